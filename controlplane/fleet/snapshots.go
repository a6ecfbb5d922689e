package fleet

import (
	"context"
	"errors"

	"torpor/api/agentpb"
	"torpor/api/apierr"
)

// SnapshotCreate keeps the present state of a sandbox.
func (n *Node) SnapshotCreate(ctx context.Context, sandboxID, snapshotID string) (*agentpb.Snapshot, error) {
	kept, _, err := invoke(ctx, n, agentpb.AgentClient.SnapshotCreate,
		&agentpb.SnapshotCreateRequest{SandboxId: sandboxID, SnapshotId: snapshotID})
	return kept, err
}

// Snapshots asks for all kept snapshots of the node, by id.
func (n *Node) Snapshots(ctx context.Context) (map[string]*agentpb.Snapshot, error) {
	resp, err := read(ctx, n, agentpb.AgentClient.SnapshotList, &agentpb.SnapshotListRequest{})
	if err != nil {
		return nil, err
	}
	kept := make(map[string]*agentpb.Snapshot, len(resp.Snapshots))
	for _, s := range resp.Snapshots {
		kept[s.SnapshotId] = s
	}
	return kept, nil
}

// SnapshotDelete removes a kept snapshot. If the answer of an earlier attempt was lost, not_found is success.
func (n *Node) SnapshotDelete(ctx context.Context, snapshotID string) error {
	_, attempts, err := invoke(ctx, n, agentpb.AgentClient.SnapshotDelete, &agentpb.SnapshotDeleteRequest{SnapshotId: snapshotID})
	if attempts > 1 && errors.Is(err, &apierr.Error{Code: apierr.NotFound}) {
		return nil
	}
	return err
}

// Fork makes sandboxes out of the present state of one, which goes on. The results are in the order of the children.
func (n *Node) Fork(ctx context.Context, req *agentpb.ForkRequest) ([]*agentpb.ForkResult, error) {
	resp, _, err := invoke(ctx, n, agentpb.AgentClient.Fork, req)
	if err != nil {
		return nil, err
	}
	if len(resp.Results) != len(req.Children) {
		return nil, apierr.New(apierr.Internal, "the agent answered %d results for %d forks", len(resp.Results), len(req.Children))
	}
	for _, r := range resp.Results {
		if r.Sandbox != nil {
			_, _ = n.saw(r.Sandbox, nil) // an error only for none
		}
	}
	return resp.Results, nil
}

// Rollback takes a sandbox back to one of its snapshots.
func (n *Node) Rollback(ctx context.Context, sandboxID, snapshotID string) (*agentpb.Sandbox, error) {
	sb, _, err := invoke(ctx, n, agentpb.AgentClient.Rollback, &agentpb.RollbackRequest{SandboxId: sandboxID, SnapshotId: snapshotID})
	return n.saw(sb, err)
}
