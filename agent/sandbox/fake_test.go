package sandbox

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"torpor/agent/disk"
	"torpor/agent/durable"
	"torpor/agent/kept"
	"torpor/agent/snapcache"
	"torpor/agent/store"
	"torpor/agent/template"
	"torpor/agent/timing"
	"torpor/agent/vmproc"
	"torpor/api/apierr"
	"torpor/api/guestpb"
	"torpor/api/vmmpb"
)

// world stands for the host: processes that live on when an agent goes, and guests in them. It checks by itself that there
// are never two VMMs for one sandbox.
type world struct {
	t *testing.T

	mu       sync.Mutex
	procs    map[string]*proc // living, by name; guarded by mu
	nextPID  int
	counts   map[string]int // calls by operation; guarded by mu
	breaches []string
	hook     func(ctx context.Context, op, name string) error // called before each operation, outside mu
}

// proc is one process with a guest.
type proc struct {
	name        string
	id          vmproc.Identity
	gone        chan struct{} // closed when the process has ended
	guestEnd    chan struct{} // closed when the guest has ended
	endReason   string
	state       string // idle | running | paused | ended
	memory      string // what the guest keeps in RAM only
	incarnation uint64 // of the last handshake
	handshakes  int
	lost        chan struct{} // of the open contact
}

func newWorld(t *testing.T) *world {
	return &world{t: t, procs: map[string]*proc{}, counts: map[string]int{}, nextPID: 1000}
}

func (w *world) call(ctx context.Context, op, name string) error {
	w.mu.Lock()
	w.counts[op]++
	hook := w.hook
	w.mu.Unlock()
	if hook == nil {
		return ctx.Err()
	}
	if err := hook(ctx, op, name); err != nil {
		return err
	}
	return ctx.Err()
}

func (w *world) setHook(hook func(ctx context.Context, op, name string) error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hook = hook
}

func (w *world) count(op string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.counts[op]
}

// proc returns the living process of a sandbox, nil if there is none.
func (w *world) proc(name string) *proc {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.procs[name]
}

func (w *world) setMemory(name, memory string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.procs[name].memory = memory
}

func (w *world) memory(name string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if p := w.procs[name]; p != nil {
		return p.memory
	}
	return "(no process)"
}

// die ends a process, as SIGKILL does.
func (w *world) die(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if p := w.procs[name]; p != nil {
		w.dieLocked(p)
	}
}

func (w *world) dieLocked(p *proc) {
	if w.procs[p.name] == p {
		delete(w.procs, p.name)
		close(p.gone)
		if p.lost != nil {
			close(p.lost)
			p.lost = nil
		}
	}
}

// powerOff ends a guest; its process stays.
func (w *world) powerOff(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := w.procs[name]
	p.state, p.endReason = "ended", "poweroff"
	close(p.guestEnd)
}

// loseContact breaks the control connection of a guest.
func (w *world) loseContact(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if p := w.procs[name]; p != nil && p.lost != nil {
		close(p.lost)
		p.lost = nil
	}
}

// VMMs.

func (w *world) Start(ctx context.Context, name, _ string) (VM, error) {
	if err := w.call(ctx, "start", name); err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.procs[name] != nil {
		w.breaches = append(w.breaches, "a second VMM was started for "+name)
	}
	w.nextPID++
	p := &proc{
		name: name, id: vmproc.Identity{PID: w.nextPID, Start: uint64(w.nextPID), Boot: "b"}, state: "idle",
		gone: make(chan struct{}), guestEnd: make(chan struct{}),
	}
	w.procs[name] = p
	return newFakeVM(w, p), nil
}

func (w *world) Adopt(ctx context.Context, name string, id vmproc.Identity) (VM, error) {
	if err := w.call(ctx, "adopt", name); err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if p := w.procs[name]; p != nil && p.id == id {
		return newFakeVM(w, p), nil
	}
	return nil, vmproc.ErrGone
}

func (w *world) Scan() ([]vmproc.Found, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var found []vmproc.Found
	for _, p := range w.procs {
		found = append(found, vmproc.Found{Identity: p.id, Name: p.name})
	}
	return found, nil
}

func (w *world) End(_ context.Context, id vmproc.Identity) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range w.procs {
		if p.id == id {
			w.dieLocked(p)
		}
	}
	return nil
}

func (w *world) VsockSocket(name string) string { return name }
func (w *world) Clear(string) error             { return nil }

// fakeVM is one agent's hold of a process.
type fakeVM struct {
	vmmpb.VMMService // nil: what a sandbox does not call
	w                *world
	p                *proc
	once             sync.Once
	done             chan struct{}
	let              chan struct{} // closed by Detach
}

func newFakeVM(w *world, p *proc) *fakeVM {
	v := &fakeVM{w: w, p: p, done: make(chan struct{}), let: make(chan struct{})}
	go func() {
		select {
		case <-p.gone:
		case <-v.let:
		}
		close(v.done)
	}()
	return v
}

func (v *fakeVM) Identity() vmproc.Identity { return v.p.id }
func (v *fakeVM) Done() <-chan struct{}     { return v.done }
func (v *fakeVM) Ended() string             { return "signal: killed" }
func (v *fakeVM) Detach()                   { v.once.Do(func() { close(v.let) }) }

func (v *fakeVM) Kill(ctx context.Context) error {
	if err := v.w.call(ctx, "kill", v.p.name); err != nil {
		return err
	}
	select {
	case <-v.let:
		return errors.New("let go of")
	default:
	}
	v.w.mu.Lock()
	v.w.dieLocked(v.p)
	v.w.mu.Unlock()
	<-v.done
	return nil
}

func (v *fakeVM) Stop(ctx context.Context, _ time.Duration) error {
	if err := v.w.call(ctx, "stop", v.p.name); err != nil {
		return err
	}
	return v.Kill(ctx)
}

// in runs f on the process if it lives and its guest is in one of the states.
func (v *fakeVM) in(ctx context.Context, op string, states []string, f func() error) error {
	if err := v.w.call(ctx, op, v.p.name); err != nil {
		return err
	}
	v.w.mu.Lock()
	defer v.w.mu.Unlock()
	if v.w.procs[v.p.name] != v.p {
		return errors.New("ttrpc: closed")
	}
	if !slices.Contains(states, v.p.state) {
		return apierr.New(apierr.Internal, "%s while %s", op, v.p.state)
	}
	return f()
}

func (v *fakeVM) Boot(context.Context, *vmmpb.BootRequest) (*vmmpb.BootResponse, error) {
	return nil, errors.New("not used")
}

func (v *fakeVM) Restore(ctx context.Context, r *vmmpb.RestoreRequest) (*vmmpb.RestoreResponse, error) {
	err := v.in(ctx, "restore", []string{"idle"}, func() error {
		from := r.BaseMemory
		if n := len(r.MemoryLayers); n > 0 {
			from = r.MemoryLayers[n-1]
		}
		raw, err := os.ReadFile(from)
		if err != nil {
			return err
		}
		for _, d := range append([]string{r.Machine.Disks[0].Top}, r.Machine.Disks[0].Layers...) {
			if _, err := os.Stat(d); err != nil {
				return err
			}
		}
		v.p.memory, v.p.state = string(raw), "running"
		return nil
	})
	return &vmmpb.RestoreResponse{}, err
}

func (v *fakeVM) Pause(ctx context.Context, _ *vmmpb.PauseRequest) (*vmmpb.PauseResponse, error) {
	return &vmmpb.PauseResponse{}, v.in(ctx, "pause", []string{"running", "paused"}, func() error { v.p.state = "paused"; return nil })
}

func (v *fakeVM) Resume(ctx context.Context, _ *vmmpb.ResumeRequest) (*vmmpb.ResumeResponse, error) {
	return &vmmpb.ResumeResponse{}, v.in(ctx, "resume", []string{"running", "paused"}, func() error { v.p.state = "running"; return nil })
}

func (v *fakeVM) Save(ctx context.Context, r *vmmpb.SaveRequest) (*vmmpb.SaveResponse, error) {
	err := v.in(ctx, "save", []string{"paused"}, func() error {
		return errors.Join(os.WriteFile(r.State, []byte("state"), 0o600), os.WriteFile(r.Memory, []byte(v.p.memory), 0o600))
	})
	return &vmmpb.SaveResponse{}, err
}

func (v *fakeVM) Checkpoint(ctx context.Context, r *vmmpb.CheckpointRequest) (*vmmpb.CheckpointResponse, error) {
	err := v.in(ctx, "checkpoint", []string{"running"}, func() error {
		for _, top := range r.Tops {
			if _, err := os.Stat(top); err != nil {
				return err
			}
		}
		return errors.Join(os.WriteFile(r.State, []byte("state"), 0o600), os.WriteFile(r.Memory, []byte(v.p.memory), 0o600))
	})
	return &vmmpb.CheckpointResponse{Saved: &vmmpb.SaveResponse{}}, err
}

func (v *fakeVM) Status(ctx context.Context, _ *vmmpb.StatusRequest) (*vmmpb.StatusResponse, error) {
	v.w.mu.Lock()
	defer v.w.mu.Unlock()
	if v.w.procs[v.p.name] != v.p {
		return nil, errors.New("ttrpc: closed")
	}
	return &vmmpb.StatusResponse{State: v.p.state, EndReason: v.p.endReason, ResidentBytes: 1 << 20}, ctx.Err()
}

func (v *fakeVM) Wait(ctx context.Context, _ *vmmpb.WaitRequest) (*vmmpb.WaitResponse, error) {
	select {
	case <-v.p.guestEnd:
		return &vmmpb.WaitResponse{Reason: v.p.endReason}, nil
	case <-v.done:
		return nil, errors.New("ttrpc: closed")
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (v *fakeVM) Quit(context.Context, *vmmpb.QuitRequest) (*vmmpb.QuitResponse, error) {
	return &vmmpb.QuitResponse{}, nil
}

// fakeGuest is envd inside the process of a name.
type fakeGuest struct {
	w    *world
	name string
}

type fakeContact struct{ lost chan struct{} }

func (c *fakeContact) EnvdVersion() string   { return "0.6.13" }
func (c *fakeContact) Lost() <-chan struct{} { return c.lost }
func (c *fakeContact) Close()                {}

func (g *fakeGuest) running() (*proc, error) {
	p := g.w.procs[g.name]
	if p == nil || p.state != "running" {
		return nil, errors.New("connection refused")
	}
	return p, nil
}

func (g *fakeGuest) Handshake(ctx context.Context, req *guestpb.HandshakeRequest) (Contact, error) {
	if err := g.w.call(ctx, "handshake", g.name); err != nil {
		return nil, err
	}
	g.w.mu.Lock()
	defer g.w.mu.Unlock()
	p, err := g.running()
	if err != nil {
		return nil, err
	}
	if len(req.Entropy) < 32 || req.SandboxId != g.name || req.Incarnation == 0 {
		return nil, fmt.Errorf("bad handshake %v", req)
	}
	if req.Incarnation < p.incarnation {
		g.w.breaches = append(g.w.breaches, "the incarnation went back")
	}
	p.incarnation = req.Incarnation
	p.handshakes++
	p.lost = make(chan struct{})
	return &fakeContact{p.lost}, nil
}

func (g *fakeGuest) Probe(ctx context.Context, incarnation uint64) (time.Duration, error) {
	if err := g.w.call(ctx, "probe", g.name); err != nil {
		return 0, err
	}
	g.w.mu.Lock()
	defer g.w.mu.Unlock()
	p, err := g.running()
	if err != nil {
		return 0, err
	}
	if p.incarnation != incarnation {
		return 0, fmt.Errorf("incarnation %d", p.incarnation)
	}
	return time.Millisecond, nil
}

func (g *fakeGuest) Dial(ctx context.Context, _ uint16) (net.Conn, error) {
	g.w.mu.Lock()
	defer g.w.mu.Unlock()
	if _, err := g.running(); err != nil {
		return nil, err
	}
	a, b := net.Pipe()
	b.Close()
	return a, ctx.Err()
}

// fakeTemplates has one template, "base".
type fakeTemplates struct{ t *template.Template }

func (f *fakeTemplates) Get(_ context.Context, id string) (*template.Template, error) {
	if id != f.t.ID {
		return nil, apierr.New(apierr.NotFound, "there is no template %q", id)
	}
	return f.t, nil
}

func (f *fakeTemplates) ByDigest(_ context.Context, digest string) (*template.Template, error) {
	if digest != f.t.Digest {
		return nil, apierr.New(apierr.SandboxBroken, "the template is gone")
	}
	return f.t, nil
}

// layers are real ones on a file system whose free space the test sets.
type layers struct {
	disk.Layers
	mu   sync.Mutex
	full bool
}

func (l *layers) Free(string) (uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.full {
		return 0, nil
	}
	return 1 << 40, nil
}

func (l *layers) fill(full bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.full = full
}

// rig is an agent's sandboxes in a world.
type rig struct {
	t         *testing.T
	dir       string
	w         *world
	m         *Manager
	cfg       Config
	layers    *layers
	templates *fakeTemplates
}

func newRig(t *testing.T, adjust ...func(*timing.Budgets)) *rig {
	t.Helper()
	dir := t.TempDir()
	st, err := store.Open(t.Context(), filepath.Join(dir, "agent.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	draft, err := snapcache.Begin(filepath.Join(dir, "template"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{template.StateFile, template.MemoryFile, "disk.layer"} {
		if err := os.WriteFile(draft.Path(f), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	snap, err := draft.Publish(snapcache.Manifest{Kind: "template", Owner: "base", Parent: "sha256:0123456789abcdef"})
	if err != nil {
		t.Fatal(err)
	}
	budgets, err := timing.New(1)
	if err != nil {
		t.Fatal(err)
	}
	budgets.PauseGrace, budgets.ProbeEvery = 20*time.Millisecond, 10*time.Millisecond
	budgets.RetryMin, budgets.RetryMax = time.Millisecond, 20*time.Millisecond
	budgets.Quit = 100 * time.Millisecond
	for _, a := range adjust {
		a(&budgets)
	}
	r := &rig{t: t, dir: dir, w: newWorld(t), layers: &layers{}, templates: &fakeTemplates{&template.Template{
		ID: "base", Digest: "sha256:0123456789abcdef", Snapshot: snap, RootFS: filepath.Join(dir, "rootfs"),
		VCPUs: 2, MemoryBytes: 512 << 20, DiskBytes: 1 << 20, EnvdVersion: "0.6.13",
	}}}
	r.cfg = Config{
		Dir: filepath.Join(dir, "sandboxes"), FS: durable.OS{}, Kept: r.shelf(), Reserve: 1 << 20, Store: st, VMMs: r.w,
		Guests:    func(socket string) Guest { return &fakeGuest{r.w, socket} },
		Templates: r.templates, Layers: r.layers, Budgets: budgets, Log: zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.WarnLevel),
	}
	r.open()
	t.Cleanup(func() {
		r.m.Close()
		r.w.mu.Lock()
		defer r.w.mu.Unlock()
		for _, b := range r.w.breaches {
			t.Error(b)
		}
	})
	return r
}

// shelf opens what is kept, as an agent does when it starts.
func (r *rig) shelf() *kept.Shelf {
	r.t.Helper()
	shelf, err := kept.Open(filepath.Join(r.dir, "snapshots"), durable.OS{})
	if err != nil {
		r.t.Fatal(err)
	}
	return shelf
}

func (r *rig) open() {
	r.t.Helper()
	m, err := Open(context.Background(), r.cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	r.m = m
}

// restart ends this agent and starts another; between runs while none runs.
func (r *rig) restart(between func()) {
	r.t.Helper()
	r.m.Close()
	if between != nil {
		between()
	}
	r.cfg.Kept = r.shelf()
	r.open()
}

func request(id string) CreateRequest {
	return CreateRequest{
		ID: id, TemplateID: "base", Token: "secret", Env: map[string]string{"A": "1"}, Timeout: time.Hour, OnTimeout: "pause", AutoResume: true,
	}
}

func (r *rig) create(id string, adjust ...func(*CreateRequest)) *Sandbox {
	r.t.Helper()
	req := request(id)
	for _, a := range adjust {
		a(&req)
	}
	v, err := r.m.Create(r.ctx(), req)
	if err != nil {
		r.t.Fatal(err)
	}
	if !v.Usable() {
		r.t.Fatalf("create answered before it was usable: %+v", v)
	}
	return r.get(id)
}

func (r *rig) get(id string) *Sandbox {
	r.t.Helper()
	s, err := r.m.Get(id)
	if err != nil {
		r.t.Fatal(err)
	}
	return s
}

// ctx bounds a call generously: a test that hangs says where.
func (r *rig) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	r.t.Cleanup(cancel)
	return ctx
}

func (r *rig) pause(s *Sandbox) View {
	r.t.Helper()
	v, err := s.Pause(r.ctx())
	if err != nil {
		r.t.Fatal(err)
	}
	return v
}

func (r *rig) resume(s *Sandbox) View {
	r.t.Helper()
	v, _, err := s.Resume(r.ctx(), 0)
	if err != nil {
		r.t.Fatal(err)
	}
	if !v.Usable() {
		r.t.Fatalf("resume answered before it was usable: %+v", v)
	}
	return v
}

// until waits for a sandbox's view to satisfy ok, by the events of Watch.
func (r *rig) until(s *Sandbox, what string, ok func(View) bool) View {
	r.t.Helper()
	var seen View
	found := errors.New("found")
	err := r.m.Watch(r.ctx(), s.id, func(c Change) error {
		seen = c.View
		if !c.Removed && ok(c.View) {
			return found
		}
		return nil
	})
	if !errors.Is(err, found) {
		r.t.Fatalf("never %s; last seen %s (%s) envd %s: %v", what, seen.State, seen.Reason, seen.Envd.State, err)
	}
	return seen
}

func (r *rig) gone(id string) {
	r.t.Helper()
	if _, err := r.m.Get(id); !isCode(err, apierr.NotFound) {
		r.t.Errorf("%s is still there: %v", id, err)
	}
	if r.w.proc(id) != nil {
		r.t.Errorf("%s still has a VMM", id)
	}
	if _, err := os.Stat(filepath.Join(r.cfg.Dir, id)); !os.IsNotExist(err) {
		r.t.Errorf("%s still has files", id)
	}
}

func allow(string) bool { return true }
func deny(string) bool  { return false }

func wantCode(t *testing.T, err error, code apierr.Code) {
	t.Helper()
	if !isCode(err, code) {
		t.Errorf("got %v, want code %s", err, code)
	}
}

// hasEvent reports whether the sandbox made a transition whose reason contains a text.
func (r *rig) hasEvent(id string, to VMState, reason string) bool {
	r.t.Helper()
	events, err := r.m.Events(r.ctx(), id, 0, 1000)
	if err != nil {
		r.t.Fatal(err)
	}
	return slices.ContainsFunc(events, func(e store.Event) bool {
		return e.Type == "vm" && e.To == string(to) && strings.Contains(e.Reason, reason)
	})
}
