package rest

import (
	"errors"
	"net/http"
	"time"

	"torpor/api/agentpb"
	"torpor/api/apierr"
	"torpor/api/e2b"
	"torpor/controlplane/reply"
)

// pause answers when the snapshot is published.
func (a *API) pause(w http.ResponseWriter, r *http.Request) error {
	var req e2b.PauseSandbox
	if err := decodeOptional(r, &req); err != nil {
		return err
	}
	if req.Memory != nil && !*req.Memory {
		return unsupported("memory:false", "a pause always keeps the memory")
	}
	row, err := a.find(r)
	if err != nil {
		return err
	}
	ctx, cancel := mustFinish(r)
	defer cancel()
	if _, err := a.node.Pause(ctx, row.ID); err != nil {
		return err
	}
	reply.NoContent(w)
	return nil
}

// setTimeout moves the deadline of a running sandbox to now + timeout, also to an earlier time; negative counts as 0.
func (a *API) setTimeout(w http.ResponseWriter, r *http.Request) error {
	var req e2b.SetTimeout
	if err := decode(r, &req); err != nil {
		return err
	}
	if req.Timeout == nil {
		return apierr.New(apierr.BadRequest, "field \"timeout\" is required")
	}
	seconds := max(0, *req.Timeout)
	if err := a.checkMaximum(seconds); err != nil {
		return err
	}
	return a.moveDeadline(w, r, time.Duration(seconds)*time.Second, false)
}

// refresh only extends, by at least 15 s and at most an hour.
func (a *API) refresh(w http.ResponseWriter, r *http.Request) error {
	var req e2b.Refresh
	if err := decodeOptional(r, &req); err != nil {
		return err
	}
	seconds := int64(0)
	if req.Duration != nil {
		seconds = *req.Duration
	}
	if seconds < 0 || seconds > 3600 {
		return apierr.New(apierr.BadRequest, "field \"duration\" must be between 0 and 3600 seconds")
	}
	return a.moveDeadline(w, r, time.Duration(max(15, seconds))*time.Second, true)
}

// moveDeadline answers 404 for a sandbox that has no running clock, 409 for one on its way to another state.
func (a *API) moveDeadline(w http.ResponseWriter, r *http.Request, d time.Duration, extendOnly bool) error {
	row, sb, err := a.look(r)
	if err != nil {
		return err
	}
	switch sb.GetVm().GetState() {
	case agentpb.VMState_VM_STATE_RUNNING:
	case agentpb.VMState_VM_STATE_CREATING, agentpb.VMState_VM_STATE_PAUSING, agentpb.VMState_VM_STATE_RESUMING:
		return apierr.New(apierr.InTransition, "the sandbox is %s; try again", vmWord(sb)).With(vmWord(sb), envdWord(sb))
	default:
		return apierr.New(apierr.NotFound, "sandbox %q is not running", row.ID).With(vmWord(sb), envdWord(sb))
	}
	_, err = a.node.SetDeadline(r.Context(), row.ID, time.Now().Add(d), extendOnly)
	if errors.Is(err, &apierr.Error{Code: apierr.AlreadyPaused}) {
		return apierr.New(apierr.NotFound, "sandbox %q is not running", row.ID)
	}
	if err != nil {
		return err
	}
	reply.NoContent(w)
	return nil
}

// remove ends a sandbox in any state. It needs no live VM, only its node. One of several callers gets the 204.
func (a *API) remove(w http.ResponseWriter, r *http.Request) error {
	row, err := a.find(r)
	if err != nil {
		return err
	}
	ctx, cancel := mustFinish(r)
	defer cancel()
	_, err = a.node.State(ctx, row.ID)
	if err == nil {
		err = a.node.Kill(ctx, row.ID)
	}
	gone := errors.Is(err, &apierr.Error{Code: apierr.NotFound}) // ended on its node before: its deadline, or another DELETE
	if err != nil && !gone {
		return err
	}
	first, err := a.store.MarkDeleted(ctx, row.ID, time.Now())
	if err != nil {
		return err
	}
	if !first || gone {
		return notFound(row.ID)
	}
	reply.NoContent(w)
	return nil
}
