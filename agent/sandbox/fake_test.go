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
	"torpor/vmm/snapshot"
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
	layers   map[uint64]*fakeLayer                            // by inode: a layer may have several names; guarded by mu
	nextID   int                                              // of layers; guarded by mu
	made     func(path string)                                // told of every file a VMM makes, and each of their syncs
}

// proc is one process with a guest.
type proc struct {
	name        string
	id          vmproc.Identity
	gone        chan struct{} // closed when the process has ended
	guestEnd    chan struct{} // closed when the guest has ended
	endReason   string
	state       string          // idle | running | paused | ended
	memory      pages           // what the guest keeps in RAM only
	restored    pages           // what it was restored with: what a DIFF is relative to
	below       snapshot.Digest // the name of what a DIFF lies upon
	booted      bool
	disk        []*fakeLayer // the layers its disk consists of, the top last
	top         string       // path of the top
	incarnation uint64       // of the last handshake
	handshakes  int
	lost        chan struct{} // of the open contact
}

func newWorld(t *testing.T) *world {
	return &world{
		t: t, procs: map[string]*proc{}, counts: map[string]int{}, nextPID: 1000,
		layers: map[uint64]*fakeLayer{}, made: func(string) {},
	}
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

// failOnce has the next operation of that name fail.
func (w *world) failOnce(op string, err error) {
	done := false
	w.setHook(func(_ context.Context, got, _ string) error {
		if got == op && !done {
			done = true
			return err
		}
		return nil
	})
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
	w.procs[name].memory[0] = memory
}

// fill gives a guest so much memory in use that what it writes later is little beside it, and not worth a merge.
func (w *world) fill(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for n := uint64(40); n < 240; n++ {
		w.procs[name].memory[n] = "in use"
	}
}

func (w *world) memory(name string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if p := w.procs[name]; p != nil {
		return p.memory[0]
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
	p.memory[req.Incarnation] = "greeted" // every run leaves a trace
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

func (g *fakeGuest) ListenHello() (Hello, error) { return fakeHello{g}, nil }

type fakeHello struct{ g *fakeGuest }

func (h fakeHello) Wait(ctx context.Context) (string, error) {
	if err := h.g.w.call(ctx, "hello", h.g.name); err != nil {
		return "", err
	}
	h.g.w.mu.Lock()
	defer h.g.w.mu.Unlock()
	_, err := h.g.running()
	return "boot", err
}

func (fakeHello) Close() {}

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
	w    *world
	mu   sync.Mutex
	left uint64 // free bytes; 0: very many
	full bool
}

func (l *layers) leave(bytes uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.left = bytes
}

func (l *layers) Create(path string, size uint64) error {
	if err := l.w.call(context.Background(), "create layer", filepath.Base(path)); err != nil {
		return err
	}
	if err := l.Layers.Create(path, size); err != nil {
		return err
	}
	l.w.newLayer(path, nil)
	return nil
}

func (l *layers) Merge(ctx context.Context, dst string, from []string) error {
	if err := l.w.call(ctx, "merge layers", filepath.Base(dst)); err != nil {
		return err
	}
	if err := l.Layers.Merge(ctx, dst, from); err != nil {
		return err
	}
	l.w.newLayer(dst, from)
	return nil
}

func (l *layers) Seal(ctx context.Context, path string) error {
	if err := l.w.call(ctx, "seal layer", filepath.Base(path)); err != nil {
		return err
	}
	return l.Layers.Seal(ctx, path)
}

// host is memory of which the test says how much there is.
type hostMemory struct {
	mu    sync.Mutex
	free  uint64
	short chan struct{}
}

func (h *hostMemory) Available() (uint64, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.free, nil
}

func (h *hostMemory) set(free uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.free = free
}

func (h *hostMemory) Watch(ctx context.Context, short func()) {
	for {
		select {
		case <-h.short:
			short()
		case <-ctx.Done():
			return
		}
	}
}

func (l *layers) Free(string) (uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.full {
		return 0, nil
	}
	if l.left > 0 {
		return l.left, nil
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
	memory    *hostMemory
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
	for _, f := range []string{template.StateFile, template.MemoryFile} {
		if err := os.WriteFile(draft.Path(f), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := (disk.Layers{}).Create(draft.Path("disk.layer"), 1<<20); err != nil {
		t.Fatal(err)
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
	w := newWorld(t)
	r := &rig{t: t, dir: dir, w: w, layers: &layers{w: w}, memory: &hostMemory{free: 1 << 40, short: make(chan struct{})}, templates: &fakeTemplates{&template.Template{
		ID: "base", Digest: "sha256:0123456789abcdef", Snapshot: snap, Kernel: "vmlinux", Initrd: "initrd", RootFS: filepath.Join(dir, "rootfs"),
		VCPUs: 2, MemoryBytes: 512 << 20, DiskBytes: 1 << 20, EnvdVersion: "0.6.13",
	}}}
	if err := os.Mkdir(filepath.Join(dir, "sandboxes"), 0o700); err != nil {
		t.Fatal(err)
	}
	r.cfg = Config{
		Dir: filepath.Join(dir, "sandboxes"), FS: durable.OS{}, Kept: r.shelf(), Reserve: 1 << 20, Store: st, VMMs: r.w,
		Guests:    func(socket string) Guest { return &fakeGuest{r.w, socket} },
		Templates: r.templates, Layers: r.layers, Memory: r.memory, MemoryFloor: 1 << 30, Budgets: budgets, Log: zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.WarnLevel),
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
