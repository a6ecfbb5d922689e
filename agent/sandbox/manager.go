package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"torpor/agent/durable"
	"torpor/agent/kept"
	"torpor/agent/snapcache"
	"torpor/agent/store"
	"torpor/agent/template"
	"torpor/agent/timing"
	"torpor/api/apierr"
	"torpor/api/id"
)

// What happens when the deadline of a sandbox passes.
const (
	onTimeoutKill  = "kill"
	onTimeoutPause = "pause"
)

// maxTimeout bounds what a run can be given at once, so that no sum of times overflows. Policy is the control plane's.
const maxTimeout = 10 * 365 * 24 * time.Hour

// Config is what a Manager works with. Every field is needed.
type Config struct {
	Dir         string        // one directory a sandbox below it
	Reserve     uint64        // bytes that must stay free: a create or a pause that would take them is refused
	FrozenFor   time.Duration // how long the VM of a paused sandbox is kept; 0: not at all
	MemoryFloor uint64        // bytes of the host's memory that must stay available: frozen VMs are ended for it
	Memory      Memory
	FS          durable.FS // by which what must survive a crash is made and removed
	Kept        *kept.Shelf
	Store       *store.Store
	VMMs        VMMs
	Guests      func(vsockSocket string) Guest
	Templates   Templates
	Layers      Layers
	Budgets     timing.Budgets
	Log         zerolog.Logger
}

// Manager holds the sandboxes of this host. It is safe for concurrent use.
type Manager struct {
	cfg     Config
	ctx     context.Context // ends when the agent ends
	cancel  context.CancelCauseFunc
	undying context.Context // for work that must be finished even then
	snaps   snapcache.Cache
	hub     hub
	loops   sync.WaitGroup

	mu     sync.RWMutex
	byID   map[string]*Sandbox // guarded by mu
	closed bool                // guarded by mu
}

// Open finds out what became of the sandboxes while no agent ran, takes over the VMs that live, and starts the machine.
func Open(ctx context.Context, cfg Config) (*Manager, error) {
	m := &Manager{
		cfg: cfg, undying: context.WithoutCancel(ctx),
		snaps: snapcache.Cache{FS: cfg.FS},
		hub:   hub{watchers: map[*watcher]struct{}{}},
		byID:  map[string]*Sandbox{},
	}
	m.ctx, m.cancel = context.WithCancelCause(ctx)
	if err := m.reconcile(); err != nil {
		m.cancel(err)
		return nil, err
	}
	return m, nil
}

func (m *Manager) dir(sandboxID string) string { return filepath.Join(m.cfg.Dir, sandboxID) }

// Close lets the transitions under way end (they are undone), lets go of the VMs, which run on, and stops.
func (m *Manager) Close() {
	m.mu.Lock()
	m.closed = true
	all := make([]*Sandbox, 0, len(m.byID))
	for _, s := range m.byID {
		all = append(all, s)
	}
	m.mu.Unlock()
	m.cancel(errDraining)
	for _, s := range all {
		s.close()
	}
	m.loops.Wait()
}

// run starts the owner of a sandbox; it ends when the loop and everything the sandbox began have ended.
func (m *Manager) run(s *Sandbox) {
	m.loops.Go(func() {
		s.loop()
		s.work.Wait()
	})
}

// close ends everything of this agent's about the sandbox; the VM runs on.
func (s *Sandbox) close() {
	var op *operation
	for s.do(func() { op = s.op }) && op != nil {
		<-op.done // it was cancelled with the manager
	}
	s.endFrozen()
	s.do(func() {
		s.settleWaiters(errDraining.For(s.id))
		s.settlePausers(errDraining.For(s.id))
		s.deadline.stop()
		if s.vm != nil {
			s.vm.Detach()
		}
		if s.live != nil && s.live.contact != nil {
			s.live.contact.Close()
		}
		s.stopServing()
		s.ended = true
	})
}

func (m *Manager) find(sandboxID string) *Sandbox {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.byID[sandboxID]
}

func (m *Manager) forget(s *Sandbox) {
	m.mu.Lock()
	delete(m.byID, s.id)
	m.mu.Unlock()
	m.hub.changed(s.id)
}

// Get returns a sandbox; not_found for one that is unknown or removed.
func (m *Manager) Get(sandboxID string) (*Sandbox, error) {
	if s := m.find(sandboxID); s != nil {
		return s, nil
	}
	return nil, notFound(sandboxID)
}

// List returns every sandbox, in the order of the ids.
func (m *Manager) List() []View {
	m.mu.RLock()
	views := make([]View, 0, len(m.byID))
	for _, s := range m.byID {
		views = append(views, s.View())
	}
	m.mu.RUnlock()
	slices.SortFunc(views, func(a, b View) int { return strings.Compare(a.ID, b.ID) })
	return views
}

// Kill ends a sandbox. One that was removed before is no error; not_found is only for ids the agent never knew.
func (m *Manager) Kill(ctx context.Context, sandboxID string) error {
	if s := m.find(sandboxID); s != nil {
		return s.Kill(ctx, "killed by request")
	}
	_, err := m.cfg.Store.Sandbox(ctx, sandboxID)
	if errors.Is(err, store.ErrUnknown) {
		return notFound(sandboxID)
	}
	return err
}

// Events returns up to limit transitions of a sandbox after a sequence number, also of a removed one.
func (m *Manager) Events(ctx context.Context, sandboxID string, after uint64, limit int) ([]store.Event, error) {
	if _, err := m.cfg.Store.Sandbox(ctx, sandboxID); errors.Is(err, store.ErrUnknown) {
		return nil, notFound(sandboxID)
	} else if err != nil {
		return nil, err
	}
	return m.cfg.Store.Events(ctx, sandboxID, after, limit)
}

// Console returns where a sandbox's serial output is kept.
func (m *Manager) Console(sandboxID string) (string, error) {
	s, err := m.Get(sandboxID)
	if err != nil {
		return "", err
	}
	return s.paths.console(), nil
}

// CreateRequest says what sandbox to make.
type CreateRequest struct {
	ID         string
	TemplateID string // with a SnapshotID: what it is said to be made from; empty means what the snapshot's sandbox was
	SnapshotID string // start from this kept snapshot; empty means from the template itself
	Token      string
	Env        map[string]string
	Timeout    time.Duration
	OnTimeout  string // kill | pause; empty means kill
	AutoResume bool
}

func (r CreateRequest) validate() error {
	switch {
	case !id.ValidSandbox(r.ID):
		return apierr.New(apierr.BadRequest, "sandbox_id %q: it must be 1 to 64 characters of a-z and 0-9", r.ID)
	case r.TemplateID == "" && r.SnapshotID == "":
		return apierr.New(apierr.BadRequest, "template_id is missing")
	case r.Timeout <= 0 || r.Timeout > maxTimeout:
		return apierr.New(apierr.BadRequest, "timeout_seconds must be greater than 0 and at most %d", int64(maxTimeout/time.Second))
	case r.OnTimeout != onTimeoutKill && r.OnTimeout != onTimeoutPause:
		return apierr.New(apierr.BadRequest, "lifecycle.on_timeout %q: it must be kill or pause", r.OnTimeout)
	}
	return nil
}

// Create makes a sandbox and returns when it is ready. With the id of one that exists it makes that one ready. When it
// returns an error nothing is left of the sandbox but its events.
func (m *Manager) Create(ctx context.Context, req CreateRequest) (View, error) {
	queued := time.Now()
	if req.OnTimeout == "" {
		req.OnTimeout = onTimeoutKill
	}
	if err := req.validate(); err != nil {
		return View{}, err
	}
	s := m.find(req.ID)
	if s == nil {
		from, err := m.origin(ctx, req)
		if err != nil {
			return View{}, err
		}
		defer from.release()
		w := newWaiter(ctx, "created by request", 0)
		first := false
		if s, first, err = m.add(ctx, req, from, queued, w); err != nil {
			return View{}, err
		}
		if first {
			if err := s.await(ctx, w); err != nil {
				return View{}, err
			}
			return s.View(), nil
		}
	}
	v, _, err := s.Resume(ctx, 0)
	return v, err
}

// origin is what a new sandbox starts from.
type origin struct {
	template *template.Template
	snap     *snapcache.Snapshot // nil: the template itself
	release  func()              // lets the snapshot's files go
}

func (m *Manager) origin(ctx context.Context, req CreateRequest) (_ origin, err error) {
	budget, cancel := context.WithTimeout(ctx, m.cfg.Budgets.TemplateWait)
	defer cancel()
	from := origin{release: func() {}}
	if req.SnapshotID == "" {
		from.template, err = m.cfg.Templates.Get(budget, req.TemplateID)
		return from, err
	}
	if from.snap, from.release, err = m.cfg.Kept.Take(req.SnapshotID); err != nil {
		return origin{}, err
	}
	if from.template, err = m.cfg.Templates.ByDigest(budget, from.snap.Manifest.Parent); err != nil {
		from.release()
		return origin{}, err
	}
	return from, nil
}

// record is the first one of a sandbox. One from a snapshot begins where that ends: its incarnations are later than the one that the
// guest's memory knows, so that no old answer passes for a new one.
func (from origin) record(req CreateRequest) store.Sandbox {
	t := from.template
	r := store.Sandbox{
		ID: req.ID, TemplateID: t.ID, TemplateDigest: t.Digest, Token: req.Token, Env: req.Env,
		OnTimeout: req.OnTimeout, AutoResume: req.AutoResume, Timeout: req.Timeout,
		VCPUs: t.VCPUs, MemoryBytes: t.MemoryBytes, DiskBytes: t.DiskBytes, EnvdVersion: t.EnvdVersion,
		CreatedAt: now(), NextLayer: 1, NextGen: 1, ResumeMode: ModeNone,
	}
	if from.snap != nil {
		m := from.snap.Manifest
		r.TemplateID, r.Incarnation, r.EnvdVersion = cmp.Or(req.TemplateID, m.Template, t.ID), m.Incarnation, m.EnvdVersion
	}
	return r
}

// add makes the sandbox known and begins its creation, for which w waits from the first moment: one that fails at once has a cause to
// tell. Or it returns the one another caller was first with.
func (m *Manager) add(ctx context.Context, req CreateRequest, from origin, queued time.Time, w *waiter) (_ *Sandbox, first bool, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, false, errDraining
	}
	if s := m.byID[req.ID]; s != nil {
		return s, false, nil
	}
	switch _, err := m.cfg.Store.Sandbox(ctx, req.ID); {
	case err == nil:
		return nil, false, apierr.New(apierr.Gone, "sandbox %q has ended; create one with a new id", req.ID).For(req.ID)
	case !errors.Is(err, store.ErrUnknown):
		return nil, false, err
	}
	if err := m.checkSpace(); err != nil {
		return nil, false, err
	}
	s := newSandbox(m, from.record(req))
	if err := s.beginCreate(from, queued); err != nil { // its loop does not run yet: this goroutine is the owner
		return nil, false, err
	}
	s.waiters = append(s.waiters, w)
	m.byID[req.ID] = s
	m.run(s)
	return s, true, nil
}

// checkSpace refuses what would fill the disk.
func (m *Manager) checkSpace() error { return m.checkRoom(0) }

// checkRoom refuses what needs so many bytes beside the reserve.
func (m *Manager) checkRoom(bytes uint64) error {
	free, err := m.cfg.Layers.Free(m.cfg.Dir)
	if err != nil {
		return fmt.Errorf("how much room is left is unknown: %w", err)
	}
	if need := m.cfg.Reserve + bytes; free < need {
		return apierr.New(apierr.DiskFull, "%d MiB are free below %s and %d are needed: remove sandboxes or enlarge the disk",
			free>>20, m.cfg.Dir, need>>20)
	}
	return nil
}
