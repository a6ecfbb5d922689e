package fleet

import (
	"context"
	"errors"
	"time"

	"torpor/api/agentpb"
	"torpor/api/apierr"
)

// Observed is a sandbox's state and when its agent told it.
type Observed struct {
	Sandbox *agentpb.Sandbox
	At      time.Time
}

// Create starts a sandbox and answers when it is ready.
func (n *Node) Create(ctx context.Context, req *agentpb.CreateRequest) (*agentpb.Sandbox, error) {
	sb, _, err := invoke(ctx, n, agentpb.AgentClient.Create, req)
	return n.saw(sb, err)
}

// Pause answers when the snapshot is published. If the answer of an earlier attempt was lost, already_paused is success.
func (n *Node) Pause(ctx context.Context, id string) (*agentpb.Sandbox, error) {
	sb, attempts, err := invoke(ctx, n, agentpb.AgentClient.Pause, &agentpb.PauseRequest{SandboxId: id})
	if attempts > 1 && errors.Is(err, &apierr.Error{Code: apierr.AlreadyPaused}) {
		return n.State(ctx, id)
	}
	return n.saw(sb, err)
}

// Resume makes a sandbox ready; resumed says that it was not when the call came. timeout 0 leaves the deadline to the
// sandbox's own timeout.
func (n *Node) Resume(ctx context.Context, id string, timeout time.Duration) (sb *agentpb.Sandbox, resumed bool, err error) {
	return n.resume(ctx, &agentpb.ResumeRequest{SandboxId: id, TimeoutSeconds: int64(timeout / time.Second)})
}

// Reboot is Resume for one that is to begin without its memory if it does not run: it is booted anew on its disk.
func (n *Node) Reboot(ctx context.Context, id string, timeout time.Duration) (sb *agentpb.Sandbox, resumed bool, err error) {
	return n.resume(ctx, &agentpb.ResumeRequest{SandboxId: id, TimeoutSeconds: int64(timeout / time.Second), Cold: true})
}

func (n *Node) resume(ctx context.Context, req *agentpb.ResumeRequest) (sb *agentpb.Sandbox, resumed bool, err error) {
	resp, _, err := invoke(ctx, n, agentpb.AgentClient.Resume, req)
	sb, err = n.saw(resp.GetSandbox(), err)
	return sb, resp.GetResumed(), err
}

// Kill ends a sandbox in any state. not_found if the agent never knew it.
func (n *Node) Kill(ctx context.Context, id string) error {
	_, _, err := invoke(ctx, n, agentpb.AgentClient.Kill, &agentpb.KillRequest{SandboxId: id})
	if err == nil {
		n.forget(id)
	}
	return err
}

// SetDeadline sets a running sandbox's deadline, or with extendOnly never shortens it.
func (n *Node) SetDeadline(ctx context.Context, id string, endAt time.Time, extendOnly bool) (*agentpb.Sandbox, error) {
	req := &agentpb.SetDeadlineRequest{SandboxId: id, EndAt: endAt.UnixMilli(), ExtendOnly: extendOnly}
	sb, _, err := invoke(ctx, n, agentpb.AgentClient.SetDeadline, req)
	return n.saw(sb, err)
}

// State asks for one sandbox.
func (n *Node) State(ctx context.Context, id string) (*agentpb.Sandbox, error) {
	sb, err := read(ctx, n, agentpb.AgentClient.State, &agentpb.StateRequest{SandboxId: id})
	if errors.Is(err, &apierr.Error{Code: apierr.NotFound}) {
		n.forget(id)
	}
	return n.saw(sb, err)
}

// List asks for all sandboxes of the node.
func (n *Node) List(ctx context.Context) ([]*agentpb.Sandbox, error) {
	resp, err := read(ctx, n, agentpb.AgentClient.List, &agentpb.ListRequest{})
	if err != nil {
		return nil, err
	}
	now, seen := time.Now(), make(map[string]Observed, len(resp.Sandboxes))
	for _, sb := range resp.Sandboxes {
		seen[sb.SandboxId] = Observed{Sandbox: sb, At: now}
	}
	n.mu.Lock()
	n.seen = seen
	n.mu.Unlock()
	return resp.Sandboxes, nil
}

// Events asks for the kept transitions of a sandbox after a sequence number.
func (n *Node) Events(ctx context.Context, id string, after uint64, limit uint32) (*agentpb.EventsResponse, error) {
	return read(ctx, n, agentpb.AgentClient.Events, &agentpb.EventsRequest{SandboxId: id, After: after, Limit: limit})
}

// Console asks for the newest bytes of the serial console.
func (n *Node) Console(ctx context.Context, id string) ([]byte, error) {
	resp, err := read(ctx, n, agentpb.AgentClient.Console, &agentpb.ConsoleRequest{SandboxId: id})
	return resp.GetTail(), err
}

// Templates asks what can be created from.
func (n *Node) Templates(ctx context.Context) ([]*agentpb.Template, error) {
	resp, err := read(ctx, n, agentpb.AgentClient.Templates, &agentpb.TemplatesRequest{})
	return resp.GetTemplates(), err
}

// Describe asks what the node is.
func (n *Node) Describe(ctx context.Context) (*agentpb.NodeResponse, error) {
	return read(ctx, n, agentpb.AgentClient.Node, &agentpb.NodeRequest{})
}

// Watch calls each with the present state of a sandbox and then with every change, until ctx ends, the sandbox is removed
// (nil is returned), or the agent goes away. It uses a connection of its own, since ttrpc ends a stream only with its
// connection.
func (n *Node) Watch(ctx context.Context, id string, each func(*agentpb.Sandbox) error) error {
	client, err := n.dial(ctx)
	if err != nil {
		return unreachable(err)
	}
	defer client.Close()
	stream, err := agentpb.NewAgentClient(client).Watch(ctx, &agentpb.WatchRequest{SandboxId: id})
	if err != nil {
		return watchError(ctx, err)
	}
	for {
		event, err := stream.Recv()
		if err != nil {
			return watchError(ctx, err)
		}
		if event.Removed {
			n.forget(id)
			return nil
		}
		if sb, _ := n.saw(event.Sandbox, nil); sb != nil {
			if err := each(sb); err != nil {
				return err
			}
		}
	}
}

func watchError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if connectionLost(err) {
		return unreachable(err)
	}
	return apierr.FromStatus(err)
}

// LastSeen returns the newest state the agent told of a sandbox, however old.
func (n *Node) LastSeen(id string) (Observed, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	o, ok := n.seen[id]
	return o, ok
}

// saw remembers an answer.
func (n *Node) saw(sb *agentpb.Sandbox, err error) (*agentpb.Sandbox, error) {
	if err != nil {
		return nil, err
	}
	if sb == nil {
		return nil, apierr.New(apierr.Internal, "the agent answered without a sandbox")
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.seen[sb.SandboxId] = Observed{Sandbox: sb, At: time.Now()}
	return sb, nil
}

func (n *Node) forget(id string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.seen, id)
}
