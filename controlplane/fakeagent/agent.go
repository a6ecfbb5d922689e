// Package fakeagent is an agent without VMs, for the tests of the control plane: a real ttrpc server whose sandboxes are
// records. A test reads the calls it got and scripts what it answers.
package fakeagent

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/proto"

	"torpor/api/agentpb"
	"torpor/api/apierr"
)

// Template is the one template the agent has.
const Template = "base"

// Agent is the fake. Its exported fields may be set before it is used.
type Agent struct {
	Socket       string
	FailChildren map[int]error // of every fork, by number

	mu        sync.Mutex
	sandboxes map[string]*agentpb.Sandbox
	snapshots map[string]*agentpb.Snapshot
	killed    map[string]bool
	events    map[string][]*agentpb.Event
	fail      map[string]error
	changes   []string // calls that change something, as "Method id"
	watchers  map[chan *agentpb.WatchEvent]string
	server    *ttrpc.Server
	listener  *listener
	served    chan struct{}
}

// Start serves a fake agent on a socket of its own until the test ends.
func Start(t testing.TB) *Agent {
	t.Helper()
	dir, err := os.MkdirTemp("", "agent") //nolint:usetesting // a socket's path is at most 107 bytes, test names are longer
	if err != nil {
		t.Fatal(err)
	}
	a := New(filepath.Join(dir, "agent.sock"))
	if err := a.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		a.Stop()
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return a
}

// New returns a fake agent that does not serve yet.
func New(socket string) *Agent {
	return &Agent{
		Socket: socket, sandboxes: map[string]*agentpb.Sandbox{}, snapshots: map[string]*agentpb.Snapshot{}, killed: map[string]bool{}, fail: map[string]error{},
		events: map[string][]*agentpb.Event{}, watchers: map[chan *agentpb.WatchEvent]string{},
	}
}

// Listen starts serving; after Stop it starts again with the same sandboxes, as a restarted agent does.
func (a *Agent) Listen(ctx context.Context) error {
	inner, err := (&net.ListenConfig{}).Listen(ctx, "unix", a.Socket)
	if err != nil {
		return err
	}
	server, err := ttrpc.NewServer()
	if err != nil {
		return err
	}
	agentpb.RegisterAgentService(server, service{a})
	a.server, a.listener, a.served = server, &listener{Listener: inner}, make(chan struct{})
	go func(served chan struct{}, l net.Listener) {
		defer close(served)
		_ = server.Serve(ctx, l) // ends with Stop
	}(a.served, a.listener)
	return nil
}

// Stop ends all connections, like the death of an agent.
func (a *Agent) Stop() {
	_ = a.server.Close()
	a.listener.cut()
	<-a.served
}

// Fail makes a method answer err until it is nil again.
func (a *Agent) Fail(method string, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.fail[method] = err
}

// Changes returns the calls so far that could have changed something, as "Method id".
func (a *Agent) Changes() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.changes)
}

// Set changes a sandbox as the agent itself might, and tells the watchers.
func (a *Agent) Set(id string, change func(*agentpb.Sandbox)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	change(a.sandboxes[id])
	a.tellLocked(id)
}

// Add puts a sandbox there that no call made.
func (a *Agent) Add(sb *agentpb.Sandbox) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.sandboxes[sb.SandboxId] = sb
}

// Forget removes a sandbox, as a deadline does.
func (a *Agent) Forget(id string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.forgetLocked(id)
}

func (a *Agent) forgetLocked(id string) {
	delete(a.sandboxes, id)
	a.killed[id] = true
	for events, of := range a.watchers {
		if of == id {
			events <- &agentpb.WatchEvent{Removed: true}
		}
	}
}

func (a *Agent) tellLocked(id string) {
	for events, of := range a.watchers {
		if of == id {
			events <- &agentpb.WatchEvent{Sandbox: clone(a.sandboxes[id])}
		}
	}
}

// Ready is a sandbox as Create makes it.
func Ready(id string, timeout time.Duration) *agentpb.Sandbox {
	now := time.Now()
	return &agentpb.Sandbox{
		SandboxId: id, TemplateId: Template, Incarnation: 1,
		Vm:        &agentpb.VM{State: agentpb.VMState_VM_STATE_RUNNING, Since: now.UnixMilli(), Reason: "created"},
		Envd:      &agentpb.Envd{State: agentpb.EnvdState_ENVD_STATE_READY, Since: now.UnixMilli(), Version: "0.6.13", Incarnation: 1, LastOk: now.UnixMilli(), LatencyMs: 0.5},
		StartedAt: now.UnixMilli(), CreatedAt: now.UnixMilli(), EndAt: now.Add(timeout).UnixMilli(), TimeoutSeconds: int64(timeout / time.Second),
		Lifecycle: &agentpb.Lifecycle{OnTimeout: "kill"}, Vcpus: 2, MemoryBytes: 512 << 20, DiskBytes: 4 << 30,
		ResidentBytes: 90 << 20, LayerBytes: 1 << 20, Tier: agentpb.Tier_TIER_LIVE, ResumeMode: agentpb.ResumeMode_RESUME_MODE_NONE,
	}
}

func clone(sb *agentpb.Sandbox) *agentpb.Sandbox { return proto.Clone(sb).(*agentpb.Sandbox) }

func notFound(id string) error { return apierr.New(apierr.NotFound, "sandbox %q not found", id) }
