package fakeagent

import (
	"context"
	"maps"
	"slices"
	"time"

	"torpor/api/agentpb"
	"torpor/api/apierr"
)

// snapshot keeps what a sandbox is now. The caller holds the lock.
func (s service) snapshotLocked(sandboxID, snapshotID string) (*agentpb.Snapshot, error) {
	if have := s.snapshots[snapshotID]; have != nil {
		return have, nil
	}
	sb, ok := s.sandboxes[sandboxID]
	if !ok {
		return nil, notFound(sandboxID)
	}
	kept := &agentpb.Snapshot{
		SnapshotId: snapshotID, SandboxId: sandboxID, TemplateId: sb.TemplateId, CreatedAt: time.Now().UnixMilli(),
		Vcpus: sb.Vcpus, MemoryBytes: sb.MemoryBytes, DiskBytes: sb.DiskBytes, SizeBytes: 3 << 20, EnvdVersion: sb.GetEnvd().GetVersion(),
	}
	s.snapshots[snapshotID] = kept
	return kept, nil
}

// Snapshots returns the ids of the kept snapshots, in order.
func (a *Agent) Snapshots() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Sorted(maps.Keys(a.snapshots))
}

// DropSnapshot removes a kept snapshot that no call deleted.
func (a *Agent) DropSnapshot(id string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.snapshots, id)
}

func (s service) SnapshotCreate(_ context.Context, r *agentpb.SnapshotCreateRequest) (*agentpb.Snapshot, error) {
	unlock, err := s.enter("SnapshotCreate", r.SandboxId, true)
	defer unlock()
	if err != nil {
		return nil, err
	}
	kept, err := s.snapshotLocked(r.SandboxId, r.SnapshotId)
	return kept, apierr.ToStatus(err)
}

func (s service) SnapshotList(context.Context, *agentpb.SnapshotListRequest) (*agentpb.SnapshotListResponse, error) {
	unlock, err := s.enter("SnapshotList", "", false)
	defer unlock()
	resp := &agentpb.SnapshotListResponse{}
	for _, id := range slices.Sorted(maps.Keys(s.snapshots)) {
		resp.Snapshots = append(resp.Snapshots, s.snapshots[id])
	}
	return resp, err
}

func (s service) SnapshotDelete(_ context.Context, r *agentpb.SnapshotDeleteRequest) (*agentpb.SnapshotDeleteResponse, error) {
	unlock, err := s.enter("SnapshotDelete", r.SnapshotId, true)
	defer unlock()
	if err != nil {
		return nil, err
	}
	if s.snapshots[r.SnapshotId] == nil {
		return nil, apierr.ToStatus(apierr.New(apierr.NotFound, "snapshot %q not found", r.SnapshotId))
	}
	delete(s.snapshots, r.SnapshotId)
	return &agentpb.SnapshotDeleteResponse{}, nil
}

// Fork fails the children whose number is in FailChildren.
func (s service) Fork(_ context.Context, r *agentpb.ForkRequest) (*agentpb.ForkResponse, error) {
	unlock, err := s.enter("Fork", r.SandboxId, true)
	defer unlock()
	if err != nil {
		return nil, err
	}
	parent, ok := s.sandboxes[r.SandboxId]
	if !ok {
		return nil, apierr.ToStatus(notFound(r.SandboxId))
	}
	resp := &agentpb.ForkResponse{}
	for i, c := range r.Children {
		if failure := s.FailChildren[i]; failure != nil {
			s.killed[c.SandboxId] = true
			resp.Results = append(resp.Results, &agentpb.ForkResult{Error: apierr.Encode(failure)})
			continue
		}
		sb := Ready(c.SandboxId, time.Duration(r.TimeoutSeconds)*time.Second)
		sb.TemplateId, sb.Lifecycle = parent.TemplateId, parent.Lifecycle
		s.sandboxes[c.SandboxId] = sb
		resp.Results = append(resp.Results, &agentpb.ForkResult{Sandbox: clone(sb)})
	}
	return resp, nil
}

func (s service) Rollback(_ context.Context, r *agentpb.RollbackRequest) (*agentpb.Sandbox, error) {
	return s.change("Rollback", r.SandboxId, func(sb *agentpb.Sandbox) error {
		if s.snapshots[r.SnapshotId] == nil {
			return apierr.New(apierr.NotFound, "snapshot %q not found", r.SnapshotId)
		}
		if sb.Vm.State == agentpb.VMState_VM_STATE_RUNNING {
			sb.Incarnation++
			sb.Envd.Incarnation = sb.Incarnation
		}
		sb.Generation++
		return nil
	})
}
