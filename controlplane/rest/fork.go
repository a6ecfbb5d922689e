package rest

import (
	"context"
	"maps"
	"net/http"
	"time"

	"torpor/api/agentpb"
	"torpor/api/apierr"
	"torpor/api/e2b"
	"torpor/api/id"
	"torpor/controlplane/reply"
	"torpor/controlplane/store"
)

// maxForks is how many sandboxes one call may make.
const maxForks = 100

// fork makes sandboxes out of the present state of one, which goes on. Each is ready or has an error; the call itself fails only
// if none was begun. Without a timeout each lives 300 s: that is what SDKs sent, and those that leave it out document.
func (a *API) fork(w http.ResponseWriter, r *http.Request) error {
	var req e2b.Fork
	if err := decodeOptional(r, &req); err != nil {
		return err
	}
	count, timeout := int64(1), int64(defaultTimeoutV2)
	if req.Count != nil {
		count = *req.Count
	}
	if req.Timeout != nil {
		timeout = *req.Timeout
	}
	if count < 1 || count > maxForks {
		return apierr.New(apierr.BadRequest, "field \"count\" must be between 1 and %d", maxForks)
	}
	if err := a.checkTimeout(timeout); err != nil {
		return err
	}
	parent, _, err := a.look(r)
	if err != nil {
		return err
	}
	ctx, cancel := mustFinish(r)
	defer cancel()
	rows, order := children(parent, int(count))
	order.TimeoutSeconds = timeout
	if err := a.store.Insert(ctx, rows...); err != nil { // before they exist: a crash leaves nothing unknown
		return err
	}
	results, err := a.node.Fork(ctx, order)
	if err != nil {
		for _, row := range rows {
			a.takeBack(ctx, row.ID)
		}
		return err
	}
	answer := make([]e2b.Forked, len(rows))
	for i, row := range rows {
		answer[i] = a.forked(ctx, row, results[i])
	}
	reply.JSON(w, http.StatusCreated, answer)
	return nil
}

// children are the rows of the forks of a sandbox, and the order for its node. They have its metadata, but they are not the one
// sandbox of its user.
func children(parent store.Sandbox, count int) ([]store.Sandbox, *agentpb.ForkRequest) {
	metadata := maps.Clone(parent.Metadata)
	delete(metadata, "user_id")
	rows := make([]store.Sandbox, count)
	order := &agentpb.ForkRequest{SandboxId: parent.ID}
	for i := range rows {
		rows[i] = store.Sandbox{
			ID: id.NewSandbox(), TemplateID: parent.TemplateID, Metadata: metadata, AccessToken: id.NewToken(), NodeID: parent.NodeID,
			CreatedAt: time.Now(),
		}
		order.Children = append(order.Children, &agentpb.ForkChild{SandboxId: rows[i].ID, AccessToken: rows[i].AccessToken})
	}
	return rows, order
}

// forked is what is told of one fork.
func (a *API) forked(ctx context.Context, row store.Sandbox, result *agentpb.ForkResult) e2b.Forked {
	failure := error(nil)
	if result.Error != "" {
		failure = apierr.Decode(result.Error)
	} else {
		failure = requireReady(result.Sandbox)
	}
	if failure != nil {
		a.takeBack(ctx, row.ID)
		body := apierr.As(failure).Body()
		return e2b.Forked{Error: &body}
	}
	sb := a.sandbox(row, result.Sandbox)
	return e2b.Forked{Sandbox: &sb}
}
