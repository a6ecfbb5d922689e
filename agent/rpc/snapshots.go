package rpc

import (
	"context"

	"torpor/agent/kept"
	"torpor/agent/sandbox"
	"torpor/api/agentpb"
	"torpor/api/apierr"
)

// SnapshotCreate implements agentpb.AgentService.
func (s *Service) SnapshotCreate(ctx context.Context, r *agentpb.SnapshotCreateRequest) (*agentpb.Snapshot, error) {
	info, err := s.sandboxes.KeepSnapshot(ctx, r.SandboxId, r.SnapshotId)
	if err != nil {
		return nil, err
	}
	return snapshotMessage(info), nil
}

// SnapshotList implements agentpb.AgentService.
func (s *Service) SnapshotList(context.Context, *agentpb.SnapshotListRequest) (*agentpb.SnapshotListResponse, error) {
	resp := &agentpb.SnapshotListResponse{}
	for _, info := range s.sandboxes.Snapshots() {
		resp.Snapshots = append(resp.Snapshots, snapshotMessage(info))
	}
	return resp, nil
}

// SnapshotDelete implements agentpb.AgentService.
func (s *Service) SnapshotDelete(_ context.Context, r *agentpb.SnapshotDeleteRequest) (*agentpb.SnapshotDeleteResponse, error) {
	if err := s.sandboxes.DeleteSnapshot(r.SnapshotId); err != nil {
		return nil, err
	}
	return &agentpb.SnapshotDeleteResponse{}, nil
}

// Fork implements agentpb.AgentService.
func (s *Service) Fork(ctx context.Context, r *agentpb.ForkRequest) (*agentpb.ForkResponse, error) {
	req := sandbox.ForkRequest{ParentID: r.SandboxId, Timeout: seconds(r.TimeoutSeconds)}
	for _, c := range r.Children {
		req.Children = append(req.Children, sandbox.Child{ID: c.SandboxId, Token: c.AccessToken})
	}
	results, err := s.sandboxes.Fork(ctx, req)
	if err != nil {
		return nil, err
	}
	resp := &agentpb.ForkResponse{}
	for _, f := range results {
		if f.Err != nil {
			resp.Results = append(resp.Results, &agentpb.ForkResult{Error: apierr.Encode(f.Err)})
			continue
		}
		resp.Results = append(resp.Results, &agentpb.ForkResult{Sandbox: message(f.View)})
	}
	return resp, nil
}

// Rollback implements agentpb.AgentService.
func (s *Service) Rollback(ctx context.Context, r *agentpb.RollbackRequest) (*agentpb.Sandbox, error) {
	return answer(s.sandboxes.Rollback(ctx, r.SandboxId, r.SnapshotId))
}

func snapshotMessage(i kept.Info) *agentpb.Snapshot {
	m := i.Manifest
	return &agentpb.Snapshot{
		SnapshotId: i.ID, SandboxId: m.Owner, TemplateId: m.Template, CreatedAt: millis(m.CreatedAt),
		Vcpus: m.VCPUs, MemoryBytes: m.MemoryBytes, DiskBytes: m.DiskBytes, SizeBytes: i.SizeBytes, EnvdVersion: m.EnvdVersion,
	}
}
