// Package kept keeps the snapshots that belong to no sandbox: those that were asked for, and those that a fork makes its children
// from, which last as long as the fork.
//
// One is a directory of agent/snapcache whose files, disk layers among them, are hard links of what the sandbox had (or files of
// its own). So it needs no sandbox to live, and none needs it: what is made from it has links of its own. Its manifest is the only
// record of it: it exists from the moment that is published until the moment it is removed.
package kept

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"torpor/agent/durable"
	"torpor/agent/snapcache"
	"torpor/api/apierr"
	"torpor/api/id"
)

// The kinds of kept snapshots, as their manifests have them.
const (
	Asked   = "kept" // until it is deleted
	Passing = "fork" // gone when its fork has ended, or at the next start of the agent
)

// Shelf holds the kept snapshots of this host. It is safe for concurrent use.
type Shelf struct {
	dir   string
	cache snapcache.Cache

	mu  sync.Mutex
	all map[string]*entry // by id; guarded by mu
}

// entry is one id that is taken.
type entry struct {
	snap  *snapcache.Snapshot // nil while it is being made, and for one that is damaged
	err   error               // why it is damaged
	users sync.WaitGroup      // those who link its files now
}

// Info is a kept snapshot as it is shown.
type Info struct {
	ID        string
	Manifest  snapcache.Manifest
	SizeBytes uint64 // of all its files, as allocated; they may be shared
}

// Open reads what is kept below dir, and works by fs. What was never published, and what was kept for forks, is removed.
func Open(dir string, fs durable.FS) (*Shelf, error) {
	if err := fs.Mkdir(dir); err != nil {
		return nil, fmt.Errorf("make the directory of snapshots: %w", err)
	}
	s := &Shelf{dir: dir, cache: snapcache.Cache{FS: fs}, all: map[string]*entry{}}
	if _, err := s.cache.Sweep(dir, ""); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list the snapshots: %w", err)
	}
	for _, e := range entries {
		if !e.IsDir() || !id.ValidSandbox(e.Name()) {
			continue // not one of ours
		}
		snap, err := snapcache.Load(s.path(e.Name()))
		if err == nil && snap.Manifest.Kind == Passing {
			if err := s.cache.Remove(snap.Dir); err != nil {
				return nil, err
			}
			continue
		}
		s.all[e.Name()] = &entry{snap: snap, err: err}
	}
	return s, nil
}

func (s *Shelf) path(snapshotID string) string { return filepath.Join(s.dir, snapshotID) }

// Dir is where they are kept.
func (s *Shelf) Dir() string { return s.dir }

// Draft is a kept snapshot in the making. One of Publish and Discard ends it.
type Draft struct {
	*snapcache.Draft
	shelf *Shelf
	id    string
}

// Begin takes an id and makes a draft for it. in_transition if somebody else is making it.
func (s *Shelf) Begin(snapshotID string) (*Draft, error) {
	if !id.ValidSandbox(snapshotID) {
		return nil, apierr.New(apierr.BadRequest, "snapshot_id %q: it must be 1 to 64 characters of a-z and 0-9", snapshotID)
	}
	s.mu.Lock()
	taken := s.all[snapshotID] != nil
	if !taken {
		s.all[snapshotID] = &entry{}
	}
	s.mu.Unlock()
	if taken {
		return nil, apierr.New(apierr.InTransition, "snapshot %q is being made or removed, or is there already", snapshotID)
	}
	draft, err := s.cache.Begin(s.path(snapshotID))
	if err != nil {
		s.forget(snapshotID)
		return nil, err
	}
	return &Draft{Draft: draft, shelf: s, id: snapshotID}, nil
}

func (s *Shelf) forget(snapshotID string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.all, snapshotID)
}

// Publish makes the snapshot exist; see snapcache. On error nothing is left of it.
func (d *Draft) Publish(m snapcache.Manifest, known ...map[string]snapcache.Sum) (Info, error) {
	snap, err := d.Draft.Publish(m, known...)
	if err != nil {
		return Info{}, errors.Join(err, d.Discard())
	}
	d.shelf.mu.Lock()
	defer d.shelf.mu.Unlock()
	d.shelf.all[d.id].snap = snap
	return about(d.id, snap), nil
}

// Discard removes what there is of it.
func (d *Draft) Discard() error {
	err := d.Draft.Discard()
	d.shelf.forget(d.id)
	return err
}

// Take returns a snapshot whose files stay until release is called, also if it is deleted meanwhile. not_found if there is none,
// sandbox_broken if it is damaged.
func (s *Shelf) Take(snapshotID string) (snap *snapcache.Snapshot, release func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.all[snapshotID]
	switch {
	case e == nil, e.snap == nil && e.err == nil:
		return nil, nil, notFound(snapshotID)
	case e.err != nil:
		return nil, nil, apierr.New(apierr.SandboxBroken, "snapshot %q cannot be used: %w", snapshotID, e.err)
	}
	e.users.Add(1)
	return e.snap, sync.OnceFunc(e.users.Done), nil
}

// Get tells about one; false if there is none that is whole.
func (s *Shelf) Get(snapshotID string) (Info, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.all[snapshotID]
	if e == nil || e.snap == nil {
		return Info{}, false
	}
	return about(snapshotID, e.snap), true
}

// Delete removes a snapshot, damaged or not. From its first moment on nobody can take it; those who have it finish before its
// files go.
func (s *Shelf) Delete(snapshotID string) error {
	s.mu.Lock()
	e := s.all[snapshotID]
	if e == nil || e.snap == nil && e.err == nil {
		s.mu.Unlock()
		return notFound(snapshotID)
	}
	e.snap, e.err = nil, nil // the id stays taken until the files are gone
	s.mu.Unlock()
	e.users.Wait()
	err := s.cache.Remove(s.path(snapshotID))
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		e.err = fmt.Errorf("it could not be removed whole: %w", err) // Delete may be tried again
		return err
	}
	delete(s.all, snapshotID)
	return nil
}

// List returns what was asked for and is whole, in the order of the ids.
func (s *Shelf) List() []Info {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []Info
	for snapshotID, e := range s.all {
		if e.snap != nil && e.snap.Manifest.Kind == Asked {
			all = append(all, about(snapshotID, e.snap))
		}
	}
	slices.SortFunc(all, func(a, b Info) int { return strings.Compare(a.ID, b.ID) })
	return all
}

// Digests lists the templates that the kept snapshots build on.
func (s *Shelf) Digests() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var digests []string
	for _, e := range s.all {
		if e.snap != nil && !slices.Contains(digests, e.snap.Manifest.Parent) {
			digests = append(digests, e.snap.Manifest.Parent)
		}
	}
	return digests
}

func about(snapshotID string, snap *snapcache.Snapshot) Info {
	size := snap.AllocatedBytes()
	for _, l := range snap.Manifest.Layers {
		size += snapcache.Allocated(snap.Path(l))
	}
	return Info{ID: snapshotID, Manifest: snap.Manifest, SizeBytes: size}
}

func notFound(snapshotID string) error {
	return apierr.New(apierr.NotFound, "there is no snapshot %q", snapshotID)
}
