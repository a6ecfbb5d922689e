package rest

import (
	"context"
	"net/http"
	"time"

	"torpor/api/agentpb"
	"torpor/api/apierr"
	"torpor/api/e2b"
	"torpor/controlplane/reply"
)

func (a *API) connectV1(w http.ResponseWriter, r *http.Request) error {
	var req e2b.ConnectSandbox
	if err := decode(r, &req); err != nil {
		return err
	}
	if req.Timeout == nil {
		return apierr.New(apierr.BadRequest, "field \"timeout\" is required")
	}
	return a.connect(w, r, req)
}

func (a *API) connectV2(w http.ResponseWriter, r *http.Request) error {
	var req e2b.ConnectSandbox
	if err := decodeOptional(r, &req); err != nil {
		return err
	}
	if req.Timeout == nil {
		fallback := int64(defaultTimeoutV2)
		req.Timeout = &fallback
	}
	return a.connect(w, r, req)
}

// connect makes the sandbox ready and never shortens its deadline: 200 if it was ready, 201 if it was woken.
func (a *API) connect(w http.ResponseWriter, r *http.Request, req e2b.ConnectSandbox) error {
	if req.AutoPause != nil {
		return apierr.New(apierr.UnknownField, "unknown field \"autoPause\"")
	}
	if err := a.checkTimeout(*req.Timeout); err != nil {
		return err
	}
	row, err := a.find(r)
	if err != nil {
		return err
	}
	sb, resumed, err := a.wake(r, row.ID, *req.Timeout, a.starter(req))
	if err != nil {
		return err
	}
	status := http.StatusOK
	if resumed {
		status = http.StatusCreated
	}
	reply.JSON(w, status, a.sandbox(row, sb))
	return nil
}

// resume is the deprecated call: it wants a sandbox that does not run.
func (a *API) resume(w http.ResponseWriter, r *http.Request) error {
	var req e2b.ConnectSandbox
	if err := decodeOptional(r, &req); err != nil {
		return err
	}
	if req.Timeout == nil {
		fallback := int64(defaultTimeoutV1)
		req.Timeout = &fallback
	}
	if err := a.checkTimeout(*req.Timeout); err != nil {
		return err
	}
	row, sb, err := a.look(r)
	if err != nil {
		return err
	}
	if publicState(sb) == e2b.Running {
		return apierr.New(apierr.AlreadyRunning, "the sandbox is running already")
	}
	if req.AutoPause != nil && *req.AutoPause != (sb.GetLifecycle().GetOnTimeout() == "pause") {
		return unsupported("autoPause", "a sandbox keeps the lifecycle it was created with")
	}
	sb, _, err = a.wake(r, row.ID, *req.Timeout, a.starter(req))
	if err != nil {
		return err
	}
	reply.JSON(w, http.StatusCreated, a.sandbox(row, sb))
	return nil
}

// starter is a call of the node that makes a sandbox ready.
type starter func(ctx context.Context, id string, timeout time.Duration) (sb *agentpb.Sandbox, resumed bool, err error)

// starter returns how the sandbox is woken: with its memory, unless the request says memory:false.
func (a *API) starter(req e2b.ConnectSandbox) starter {
	if req.Memory != nil && !*req.Memory {
		return a.node.Reboot
	}
	return a.node.Resume
}

// wake makes the sandbox ready. The wake goes on when the client leaves.
func (a *API) wake(r *http.Request, sandboxID string, seconds int64, start starter) (sb *agentpb.Sandbox, resumed bool, err error) {
	ctx, cancel := mustFinish(r)
	defer cancel()
	sb, resumed, err = start(ctx, sandboxID, time.Duration(seconds)*time.Second)
	if err == nil {
		err = requireReady(sb)
	}
	return sb, resumed, err
}
