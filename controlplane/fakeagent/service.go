package fakeagent

import (
	"context"
	"slices"
	"strings"
	"time"

	"torpor/api/agentpb"
	"torpor/api/apierr"
)

// service is the agent's ttrpc face.
type service struct{ *Agent }

// enter counts a call; the caller holds the lock until the returned func is called.
func (s service) enter(method, id string, changes bool) (unlock func(), err error) {
	s.mu.Lock()
	if changes {
		s.changes = append(s.changes, strings.TrimSpace(method+" "+id))
	}
	return s.mu.Unlock, apierr.ToStatus(s.fail[method])
}

// change runs one changing call on one sandbox.
func (s service) change(method, id string, f func(*agentpb.Sandbox) error) (*agentpb.Sandbox, error) {
	unlock, err := s.enter(method, id, true)
	defer unlock()
	if err != nil {
		return nil, err
	}
	sb, ok := s.sandboxes[id]
	if !ok {
		return nil, apierr.ToStatus(notFound(id))
	}
	if err := f(sb); err != nil {
		return nil, apierr.ToStatus(err)
	}
	s.tellLocked(id)
	return clone(sb), nil
}

func (s service) Create(_ context.Context, r *agentpb.CreateRequest) (*agentpb.Sandbox, error) {
	unlock, err := s.enter("Create", r.SandboxId, true)
	defer unlock()
	if err != nil {
		return nil, err
	}
	if r.SnapshotId != "" && s.snapshots[r.SnapshotId] == nil {
		return nil, apierr.ToStatus(apierr.New(apierr.NotFound, "snapshot %q not found", r.SnapshotId))
	}
	sb := Ready(r.SandboxId, time.Duration(r.TimeoutSeconds)*time.Second)
	sb.Lifecycle, sb.TemplateId = r.Lifecycle, r.TemplateId
	s.sandboxes[r.SandboxId] = sb
	s.events[r.SandboxId] = []*agentpb.Event{
		{Seq: 1, At: sb.CreatedAt, Type: "vm", From: "creating", To: "running", Reason: "created", Incarnation: 1, PhasesMs: map[string]float64{"restore": 12.5}},
		{Seq: 2, At: sb.CreatedAt, Type: "envd", From: "starting", To: "ready", Incarnation: 1},
	}
	return clone(sb), nil
}

func (s service) Pause(_ context.Context, r *agentpb.PauseRequest) (*agentpb.Sandbox, error) {
	return s.change("Pause", r.SandboxId, func(sb *agentpb.Sandbox) error {
		if sb.Vm.State == agentpb.VMState_VM_STATE_PAUSED {
			return apierr.New(apierr.AlreadyPaused, "the sandbox is paused already").For(r.SandboxId)
		}
		now := time.Now().UnixMilli()
		sb.Vm = &agentpb.VM{State: agentpb.VMState_VM_STATE_PAUSED, Since: now, Reason: "asked"}
		sb.Envd.State, sb.EndAt, sb.ResidentBytes = agentpb.EnvdState_ENVD_STATE_ABSENT, now, 0
		sb.Tier = agentpb.Tier_TIER_DISK
		return nil
	})
}

func (s service) Resume(_ context.Context, r *agentpb.ResumeRequest) (*agentpb.ResumeResponse, error) {
	resumed := false
	sb, err := s.change("Resume", r.SandboxId, func(sb *agentpb.Sandbox) error {
		now := time.Now()
		end := now.Add(time.Duration(r.TimeoutSeconds) * time.Second).UnixMilli()
		if resumed = sb.Vm.State != agentpb.VMState_VM_STATE_RUNNING; resumed {
			sb.Incarnation++
			sb.Vm = &agentpb.VM{State: agentpb.VMState_VM_STATE_RUNNING, Since: now.UnixMilli(), Reason: "woken"}
			sb.Envd.State, sb.Envd.Incarnation = agentpb.EnvdState_ENVD_STATE_READY, sb.Incarnation
			sb.StartedAt, sb.EndAt = now.UnixMilli(), end
			sb.Tier, sb.ResumeMode = agentpb.Tier_TIER_LIVE, agentpb.ResumeMode_RESUME_MODE_MEMORY
			if r.Cold {
				sb.ResumeMode = agentpb.ResumeMode_RESUME_MODE_COLD
			}
		}
		sb.EndAt = max(sb.EndAt, end)
		return nil
	})
	return &agentpb.ResumeResponse{Sandbox: sb, Resumed: resumed}, err
}

func (s service) Kill(_ context.Context, r *agentpb.KillRequest) (*agentpb.KillResponse, error) {
	unlock, err := s.enter("Kill", r.SandboxId, true)
	defer unlock()
	if err != nil {
		return nil, err
	}
	if _, ok := s.sandboxes[r.SandboxId]; !ok && !s.killed[r.SandboxId] {
		return nil, apierr.ToStatus(notFound(r.SandboxId))
	}
	s.forgetLocked(r.SandboxId)
	return &agentpb.KillResponse{}, nil
}

func (s service) SetDeadline(_ context.Context, r *agentpb.SetDeadlineRequest) (*agentpb.Sandbox, error) {
	return s.change("SetDeadline", r.SandboxId, func(sb *agentpb.Sandbox) error {
		if r.ExtendOnly {
			sb.EndAt = max(sb.EndAt, r.EndAt)
		} else {
			sb.EndAt = r.EndAt
		}
		return nil
	})
}

func (s service) State(_ context.Context, r *agentpb.StateRequest) (*agentpb.Sandbox, error) {
	unlock, err := s.enter("State", r.SandboxId, false)
	defer unlock()
	if err != nil {
		return nil, err
	}
	sb, ok := s.sandboxes[r.SandboxId]
	if !ok {
		return nil, apierr.ToStatus(notFound(r.SandboxId))
	}
	return clone(sb), nil
}

func (s service) List(context.Context, *agentpb.ListRequest) (*agentpb.ListResponse, error) {
	unlock, err := s.enter("List", "", false)
	defer unlock()
	resp := &agentpb.ListResponse{}
	for _, sb := range s.sandboxes {
		resp.Sandboxes = append(resp.Sandboxes, clone(sb))
	}
	return resp, err
}

func (s service) Watch(ctx context.Context, r *agentpb.WatchRequest, stream agentpb.Agent_WatchServer) error {
	events := make(chan *agentpb.WatchEvent, 100)
	s.mu.Lock()
	s.watchers[events] = r.SandboxId
	if sb, ok := s.sandboxes[r.SandboxId]; ok {
		events <- &agentpb.WatchEvent{Sandbox: clone(sb)}
	}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.watchers, events)
	}()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case e := <-events:
			if err := stream.Send(e); err != nil {
				return err
			}
		}
	}
}

func (s service) Events(_ context.Context, r *agentpb.EventsRequest) (*agentpb.EventsResponse, error) {
	unlock, err := s.enter("Events", r.SandboxId, false)
	defer unlock()
	resp := &agentpb.EventsResponse{Next: r.After}
	for _, e := range s.events[r.SandboxId] {
		if e.Seq > r.After {
			resp.Events = append(resp.Events, e)
		}
	}
	if len(resp.Events) > int(r.Limit) {
		resp.Events = slices.Clone(resp.Events[:r.Limit])
	}
	if n := len(resp.Events); n > 0 {
		resp.Next = resp.Events[n-1].Seq
	}
	return resp, err
}

func (s service) Console(_ context.Context, r *agentpb.ConsoleRequest) (*agentpb.ConsoleResponse, error) {
	unlock, err := s.enter("Console", r.SandboxId, false)
	defer unlock()
	return &agentpb.ConsoleResponse{Tail: []byte("boot\n\xff")}, err
}

func (s service) Templates(context.Context, *agentpb.TemplatesRequest) (*agentpb.TemplatesResponse, error) {
	unlock, err := s.enter("Templates", "", false)
	defer unlock()
	return &agentpb.TemplatesResponse{Templates: []*agentpb.Template{
		{TemplateId: Template, Digest: "sha256:00", Vcpus: 2, MemoryBytes: 512 << 20, DiskBytes: 4 << 30, EnvdVersion: "0.6.13", State: "ready"},
	}}, err
}

func (s service) Node(context.Context, *agentpb.NodeRequest) (*agentpb.NodeResponse, error) {
	unlock, err := s.enter("Node", "", false)
	defer unlock()
	return &agentpb.NodeResponse{NodeId: "node1", Version: "test", Kvm: "kvm_amd", Emulated: true}, err
}
