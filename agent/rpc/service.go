// Package rpc serves the agent's contract (api/agentpb) over ttrpc. It only translates: every decision is made in
// agent/sandbox and agent/template.
package rpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"github.com/containerd/ttrpc"

	"torpor/agent/sandbox"
	"torpor/agent/template"
	"torpor/api/agentpb"
	"torpor/api/apierr"
)

const (
	// maxConsole bounds a Console answer, well below ttrpc's limit of 4 MiB.
	maxConsole = 256 << 10
	// maxEvents bounds a page of Events; also the default.
	maxEvents = 500
)

// Service implements agentpb.AgentService.
type Service struct {
	sandboxes *sandbox.Manager
	templates *template.Library
	node      *agentpb.NodeResponse
}

// NewServer returns a ttrpc server of the contract, with errors as apierr statuses. node is what Node answers.
func NewServer(sandboxes *sandbox.Manager, templates *template.Library, node *agentpb.NodeResponse) (*ttrpc.Server, error) {
	s := &Service{sandboxes: sandboxes, templates: templates, node: node}
	server, err := ttrpc.NewServer(ttrpc.WithUnaryServerInterceptor(statuses))
	if err != nil {
		return nil, fmt.Errorf("make the RPC server: %w", err)
	}
	agentpb.RegisterAgentService(server, s)
	return server, nil
}

func statuses(ctx context.Context, unmarshal ttrpc.Unmarshaler, _ *ttrpc.UnaryServerInfo, method ttrpc.Method) (any, error) {
	answer, err := method(ctx, unmarshal)
	return answer, apierr.ToStatus(err)
}

// Create implements agentpb.AgentService.
func (s *Service) Create(ctx context.Context, r *agentpb.CreateRequest) (*agentpb.Sandbox, error) {
	v, err := s.sandboxes.Create(ctx, sandbox.CreateRequest{
		ID: r.SandboxId, TemplateID: r.TemplateId, SnapshotID: r.SnapshotId, Token: r.AccessToken, Env: r.EnvVars, Timeout: seconds(r.TimeoutSeconds),
		OnTimeout: r.GetLifecycle().GetOnTimeout(), AutoResume: r.GetLifecycle().GetAutoResume(),
	})
	return answer(v, err)
}

// Pause implements agentpb.AgentService.
func (s *Service) Pause(ctx context.Context, r *agentpb.PauseRequest) (*agentpb.Sandbox, error) {
	sb, err := s.sandboxes.Get(r.SandboxId)
	if err != nil {
		return nil, err
	}
	return answer(sb.Pause(ctx))
}

// Resume implements agentpb.AgentService.
func (s *Service) Resume(ctx context.Context, r *agentpb.ResumeRequest) (*agentpb.ResumeResponse, error) {
	sb, err := s.sandboxes.Get(r.SandboxId)
	if err != nil {
		return nil, err
	}
	v, resumed, err := sb.Wake(ctx, sandbox.WakeRequest{Timeout: seconds(r.TimeoutSeconds), Cold: r.Cold})
	if err != nil {
		return nil, err
	}
	return &agentpb.ResumeResponse{Sandbox: message(v), Resumed: resumed}, nil
}

// Kill implements agentpb.AgentService.
func (s *Service) Kill(ctx context.Context, r *agentpb.KillRequest) (*agentpb.KillResponse, error) {
	if err := s.sandboxes.Kill(ctx, r.SandboxId); err != nil {
		return nil, err
	}
	return &agentpb.KillResponse{}, nil
}

// SetDeadline implements agentpb.AgentService.
func (s *Service) SetDeadline(_ context.Context, r *agentpb.SetDeadlineRequest) (*agentpb.Sandbox, error) {
	sb, err := s.sandboxes.Get(r.SandboxId)
	if err != nil {
		return nil, err
	}
	return answer(sb.SetDeadline(time.UnixMilli(r.EndAt).UTC(), r.ExtendOnly))
}

// State implements agentpb.AgentService.
func (s *Service) State(_ context.Context, r *agentpb.StateRequest) (*agentpb.Sandbox, error) {
	sb, err := s.sandboxes.Get(r.SandboxId)
	if err != nil {
		return nil, err
	}
	return message(sb.View()), nil
}

// List implements agentpb.AgentService.
func (s *Service) List(context.Context, *agentpb.ListRequest) (*agentpb.ListResponse, error) {
	resp := &agentpb.ListResponse{}
	for _, v := range s.sandboxes.List() {
		resp.Sandboxes = append(resp.Sandboxes, message(v))
	}
	return resp, nil
}

// Watch implements agentpb.AgentService.
func (s *Service) Watch(ctx context.Context, r *agentpb.WatchRequest, stream agentpb.Agent_WatchServer) error {
	err := s.sandboxes.Watch(ctx, r.SandboxId, func(c sandbox.Change) error {
		if c.Removed {
			return stream.Send(&agentpb.WatchEvent{Sandbox: &agentpb.Sandbox{SandboxId: c.View.ID}, Removed: true})
		}
		return stream.Send(&agentpb.WatchEvent{Sandbox: message(c.View)})
	})
	return apierr.ToStatus(err)
}

// Events implements agentpb.AgentService.
func (s *Service) Events(ctx context.Context, r *agentpb.EventsRequest) (*agentpb.EventsResponse, error) {
	limit := int(r.Limit)
	if limit <= 0 || limit > maxEvents {
		limit = maxEvents
	}
	events, err := s.sandboxes.Events(ctx, r.SandboxId, r.After, limit)
	if err != nil {
		return nil, err
	}
	resp := &agentpb.EventsResponse{Next: r.After}
	for _, e := range events {
		resp.Events = append(resp.Events, &agentpb.Event{
			Seq: e.Seq, At: millis(e.At), Type: e.Type, From: e.From, To: e.To, Reason: e.Reason,
			Incarnation: e.Incarnation, PhasesMs: e.Phases,
		})
		resp.Next = e.Seq
	}
	return resp, nil
}

// Console implements agentpb.AgentService.
func (s *Service) Console(_ context.Context, r *agentpb.ConsoleRequest) (*agentpb.ConsoleResponse, error) {
	path, err := s.sandboxes.Console(r.SandboxId)
	if err != nil {
		return nil, err
	}
	tail, err := readTail(path, maxConsole)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil // nothing has been written yet
	}
	if err != nil {
		return nil, fmt.Errorf("read the console of %s: %w", r.SandboxId, err)
	}
	return &agentpb.ConsoleResponse{Tail: tail}, nil
}

// Templates implements agentpb.AgentService.
func (s *Service) Templates(context.Context, *agentpb.TemplatesRequest) (*agentpb.TemplatesResponse, error) {
	resp := &agentpb.TemplatesResponse{}
	for _, t := range s.templates.List() {
		resp.Templates = append(resp.Templates, &agentpb.Template{
			TemplateId: t.ID, Digest: t.Digest, Vcpus: t.VCPUs, MemoryBytes: t.MemoryBytes, DiskBytes: t.DiskBytes,
			EnvdVersion: t.EnvdVersion, State: t.State, Error: t.Error,
		})
	}
	return resp, nil
}

// Node implements agentpb.AgentService.
func (s *Service) Node(context.Context, *agentpb.NodeRequest) (*agentpb.NodeResponse, error) {
	return s.node, nil
}

// readTail returns the last limit bytes of a file.
func readTail(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	return io.ReadAll(io.NewSectionReader(f, max(0, info.Size()-limit), limit))
}
