package template

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"torpor/agent/snapcache"
	"torpor/agent/store"
	"torpor/agent/timing"
	"torpor/api/apierr"
	"torpor/images/imageset"
)

// States of a template.
const (
	building = "building"
	ready    = "ready"
	failed   = "failed"
)

// MemoryBytes is the memory every sandbox has.
const MemoryBytes = 512 << 20

// maxVCPUs is what a sandbox has on a host that has as many processors.
const maxVCPUs = 2

// VCPUs returns how many every sandbox has on a host of so many processors. Never more than those: a guest kernel's processors
// wait for each other busily (TLB shootdowns, spin locks), and one that is not running because the other waits in its place
// costs whole time slices. Two on one processor were seen to take four times as long as one for everything.
func VCPUs(processors int) uint32 { return uint32(min(max(processors, 1), maxVCPUs)) }

// buildVersion changes when the way a template is made changes in this program.
const buildVersion = 1

// Config is what a Library works with. Every field is needed.
type Config struct {
	Dir      string // one directory a template below it
	Images   string // one image set a directory below it; a template is named like its set's directory
	VMM      string // the torpor-vmm binary, part of the digest
	VCPUs    uint32 // of every sandbox
	Build    func(ctx context.Context, job Job) error
	Rehearse func(ctx context.Context, t *Template) error
	Store    *store.Store
	Budgets  timing.Budgets
	Log      zerolog.Logger
}

// Job is one template to be built: the files go into the draft, which the library publishes.
type Job struct {
	Name        string // unique among the machines of the host
	Image       imageset.Manifest
	ImageDir    string
	VCPUs       uint32
	MemoryBytes uint64
	DiskBytes   uint64
	Draft       *snapcache.Draft
	Console     string
	Log         string
}

// Status is a template as it is shown.
type Status struct {
	ID, Digest  string
	VCPUs       uint32
	MemoryBytes uint64
	DiskBytes   uint64
	EnvdVersion string
	State       string // building | ready | failed
	Error       string
}

// Library holds the templates of this host. It is safe for concurrent use.
type Library struct {
	cfg    Config
	vmmSum string
	work   sync.WaitGroup
	ctx    context.Context
	cancel context.CancelFunc

	mu     sync.Mutex
	shelf  map[string]*entry    // by id; guarded by mu
	loaded map[string]*Template // by digest; guarded by mu
}

// entry is one template id. Its fields are guarded by the library's mutex.
type entry struct {
	status Status
	image  imageset.Manifest
	dir    string // of the image set
	ready  *Template
	done   chan struct{} // of the build under way, nil if none
	ended  time.Time     // of the last build
}

// Open reads the image sets. It builds nothing yet: see Build.
func Open(ctx context.Context, cfg Config) (*Library, error) {
	l := &Library{cfg: cfg, shelf: map[string]*entry{}, loaded: map[string]*Template{}}
	l.ctx, l.cancel = context.WithCancel(ctx)
	var err error
	if l.vmmSum, err = fileSum(cfg.VMM); err != nil {
		return nil, fmt.Errorf("read the VMM binary: %w", err)
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the template directory: %w", err)
	}
	if _, err := snapcache.Sweep(cfg.Dir, ""); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(cfg.Images)
	if err != nil {
		return nil, fmt.Errorf("read the image sets: %w", err)
	}
	for _, e := range entries {
		dir := filepath.Join(cfg.Images, e.Name())
		image, err := imageset.Read(dir)
		if errors.Is(err, os.ErrNotExist) {
			continue // not an image set
		}
		if err != nil {
			return nil, fmt.Errorf("image set %s: %w", e.Name(), err)
		}
		l.shelf[e.Name()] = &entry{image: image, dir: dir, status: l.describe(e.Name(), image)}
	}
	if len(l.shelf) == 0 {
		return nil, fmt.Errorf("there is no image set below %s: build one with torpor-images", cfg.Images)
	}
	return l, nil
}

func (l *Library) describe(id string, image imageset.Manifest) Status {
	s := Status{
		ID: id, VCPUs: l.cfg.VCPUs, MemoryBytes: MemoryBytes, DiskBytes: uint64(image.DiskBytes),
		EnvdVersion: image.EnvdVersion, State: building,
	}
	key, err := json.Marshal([]any{buildVersion, image.Digest, l.vmmSum, s.VCPUs, s.MemoryBytes, s.DiskBytes})
	if err != nil {
		panic(err) // strings and numbers
	}
	sum := sha256.Sum256(key)
	s.Digest = "sha256:" + hex.EncodeToString(sum[:])
	return s
}

// Build makes every template ready in the background, and removes those on the disk that are neither current nor among
// wanted (the digests sandboxes were made from).
func (l *Library) Build(wanted []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	keep := slices.Clone(wanted)
	for _, e := range l.shelf {
		keep = append(keep, e.status.Digest)
		l.begin(e)
	}
	l.work.Go(func() { l.removeUnwanted(keep) })
}

// Close ends the builds under way and waits for them.
func (l *Library) Close() {
	l.cancel()
	l.work.Wait()
}

// List returns every template, in the order of the ids.
func (l *Library) List() []Status {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []Status
	for _, e := range l.shelf {
		all = append(all, e.status)
	}
	slices.SortFunc(all, func(a, b Status) int { return strings.Compare(a.ID, b.ID) })
	return all
}

// Get returns the template of an id, waiting for its build. A build that failed is tried again, but not by every call.
func (l *Library) Get(ctx context.Context, id string) (*Template, error) {
	l.mu.Lock()
	e := l.shelf[id]
	if e == nil {
		l.mu.Unlock()
		return nil, apierr.New(apierr.NotFound, "there is no template %q", id)
	}
	if e.ready == nil && e.done == nil && time.Since(e.ended) > l.cfg.Budgets.RetryMax {
		l.begin(e)
	}
	done := e.done
	l.mu.Unlock()

	if done != nil {
		select {
		case <-done:
		case <-ctx.Done():
			return nil, apierr.New(apierr.NotReady, "template %q is still being built; try again", id)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if e.ready == nil {
		return nil, apierr.New(apierr.NotReady, "template %q could not be built: %s", id, e.status.Error)
	}
	return e.ready, nil
}

// begin starts a build in the background. l.mu is held.
func (l *Library) begin(e *entry) {
	if e.ready != nil || e.done != nil {
		return
	}
	e.done = make(chan struct{})
	e.status.State = building
	l.work.Go(func() {
		t, err := l.obtain(e)
		if err == nil && !t.rehearsed() {
			if err := l.cfg.Rehearse(l.ctx, t); err != nil {
				l.cfg.Log.Warn().Err(err).Msg("the template is used without a working set")
			}
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		e.ready, e.ended = t, time.Now()
		e.status.State, e.status.Error = ready, ""
		if err != nil {
			e.status.State, e.status.Error = failed, err.Error()
		} else {
			l.loaded[t.Digest] = t
		}
		l.record(e.status)
		close(e.done)
		e.done = nil
	})
}

func (l *Library) record(s Status) {
	ev := l.cfg.Log.Info()
	if s.State == failed {
		ev = l.cfg.Log.Error()
	}
	ev.Str("template", s.ID).Str("digest", s.Digest).Str("state", s.State).Str("error", s.Error).Msg("template")
	row := store.Template{ID: s.ID, Digest: s.Digest, State: s.State, Error: s.Error, UpdatedAt: time.Now()}
	if err := l.cfg.Store.PutTemplate(context.WithoutCancel(l.ctx), row); err != nil {
		l.cfg.Log.Error().Err(err).Msg("record a template")
	}
}

// obtain loads a template from the disk, or builds it.
func (l *Library) obtain(e *entry) (*Template, error) {
	dir := l.dir(e.status.Digest)
	snap, err := snapcache.Load(dir)
	if err == nil {
		err = snap.Verify()
	}
	switch {
	case err == nil:
		return l.template(snap, e.dir, e.image)
	case errors.Is(err, snapcache.ErrCorrupt):
		l.cfg.Log.Error().Err(err).Str("template", e.status.ID).Msg("the template is damaged and is built anew")
		if err := snapcache.Remove(dir); err != nil {
			return nil, err
		}
	case !errors.Is(err, snapcache.ErrNotExist):
		return nil, err
	}
	if snap, err = l.build(e, dir); err != nil {
		return nil, err
	}
	return l.template(snap, e.dir, e.image)
}

func (l *Library) build(e *entry, dir string) (*snapcache.Snapshot, error) {
	draft, err := snapcache.Begin(dir)
	if err != nil {
		return nil, err
	}
	s := e.status
	job := Job{
		Name: "template-" + filepath.Base(dir), Image: e.image, ImageDir: e.dir,
		VCPUs: s.VCPUs, MemoryBytes: s.MemoryBytes, DiskBytes: s.DiskBytes,
		Draft: draft, Console: dir + ".console.log", Log: dir + ".vmm.log",
	}
	began := time.Now()
	if err := l.cfg.Build(l.ctx, job); err != nil {
		return nil, errors.Join(err, draft.Discard())
	}
	snap, err := draft.Publish(snapcache.Manifest{
		Kind: "template", Owner: s.ID, Parent: built(s.Digest), Image: e.image.Digest, VCPUs: s.VCPUs, MemoryBytes: s.MemoryBytes,
		DiskBytes: s.DiskBytes, EnvdVersion: s.EnvdVersion, CreatedAt: time.Now().UTC(),
	})
	if err != nil {
		return nil, errors.Join(err, draft.Discard())
	}
	l.cfg.Log.Info().Str("template", s.ID).Dur("took", time.Since(began)).Uint64("bytes", snap.AllocatedBytes()).Msg("template built")
	return snap, nil
}

func (l *Library) dir(digest string) string {
	short := strings.TrimPrefix(recipe(digest), "sha256:")
	return filepath.Join(l.cfg.Dir, short[:min(12, len(short))])
}

func (l *Library) template(snap *snapcache.Snapshot, imageDir string, image imageset.Manifest) (*Template, error) {
	m := snap.Manifest
	return &Template{
		ID: m.Owner, Digest: m.Parent, Snapshot: snap, RootFS: filepath.Join(imageDir, image.RootFS),
		Kernel: filepath.Join(imageDir, image.Vmlinux), Initrd: filepath.Join(imageDir, image.Initrd), Cmdline: image.Cmdline,
		VCPUs: m.VCPUs, MemoryBytes: m.MemoryBytes, DiskBytes: m.DiskBytes, EnvdVersion: m.EnvdVersion,
	}, nil
}

// ByDigest returns the very template a sandbox was made from, which need not be the current one of its id. sandbox_broken if
// it or the image set below it is not there any more.
func (l *Library) ByDigest(ctx context.Context, digest string) (*Template, error) {
	l.mu.Lock()
	t := l.loaded[digest]
	var current *entry
	for _, e := range l.shelf {
		if e.status.Digest == recipe(digest) {
			current = e
		}
	}
	l.mu.Unlock()
	if t != nil {
		return t, nil
	}
	var err error
	if current != nil {
		if t, err = l.Get(ctx, current.status.ID); err != nil { // being verified, or built
			return nil, err
		}
		if t.Digest == digest {
			return t, nil
		}
		return nil, apierr.New(apierr.SandboxBroken,
			"the template this sandbox was made from was damaged or lost, and the one that was built in its place does not have the same memory")
	}
	if t, err = l.load(digest); err != nil {
		return nil, apierr.New(apierr.SandboxBroken, "the template this sandbox was made from cannot be used: %w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.loaded[digest] = t
	return t, nil
}

func (l *Library) load(digest string) (*Template, error) {
	snap, err := snapcache.Load(l.dir(digest))
	if err == nil {
		err = snap.Verify()
	}
	if err != nil {
		return nil, err
	}
	if snap.Manifest.Parent != digest {
		return nil, fmt.Errorf("it is of digest %s, not %s", snap.Manifest.Parent, digest)
	}
	for _, e := range l.shelf { // immutable after Open
		if e.image.Digest == snap.Manifest.Image {
			return l.template(snap, e.dir, e.image)
		}
	}
	return nil, fmt.Errorf("image set %s is not installed below %s", snap.Manifest.Image, l.cfg.Images)
}

func (l *Library) removeUnwanted(keep []string) {
	entries, err := os.ReadDir(l.cfg.Dir)
	if err != nil {
		l.cfg.Log.Warn().Err(err).Msg("list the templates")
	}
	for _, e := range entries {
		dir := filepath.Join(l.cfg.Dir, e.Name())
		snap, err := snapcache.Load(dir)
		needed := func(digest string) bool { return recipe(digest) == recipe(snap.Manifest.Parent) }
		if err != nil || slices.ContainsFunc(keep, needed) {
			continue
		}
		l.cfg.Log.Info().Str("digest", snap.Manifest.Parent).Msg("removing a template that nothing needs")
		err = errors.Join(snapcache.Remove(dir), os.RemoveAll(dir+".console.log"), os.RemoveAll(dir+".vmm.log"), os.RemoveAll(dir+".working-set"))
		if err != nil {
			l.cfg.Log.Warn().Err(err).Msg("remove a template")
		}
	}
}
