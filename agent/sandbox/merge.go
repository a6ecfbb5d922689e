package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"torpor/agent/snapcache"
	"torpor/agent/store"
)

// mergeShare is when memory layers are merged although they are not many: when what was added to the oldest is at least this part
// of it. So what a generation takes is bounded by what is in its memory, and no merge writes much more than was saved since
// the last.
const mergeShare = 8

// worthMerging looks at the sizes of memory layers, oldest first.
func worthMerging(sizes []uint64) bool {
	if len(sizes) < 2 {
		return false
	}
	added := uint64(0)
	for _, n := range sizes[1:] {
		added += n
	}
	return len(sizes) >= maxMemoryChain || added*mergeShare >= sizes[0]
}

// mergeMemory makes a new generation of a sandbox that is paused on disk, of the same instant as its newest, with one memory layer
// in place of several. The old one stays until the new one has been resumed.
func (s *Sandbox) mergeMemory(ctx context.Context) error {
	var from, to uint64
	var err error
	s.do(func() {
		if s.state() != Paused || s.op != nil || s.frozen != nil || !s.mergeable(s.rec.Generation) {
			return
		}
		from, to = s.rec.Generation, s.rec.NextGen
		err = s.amend(func(r *store.Sandbox) { r.NextGen++ })
	})
	if from == 0 || err != nil {
		return err
	}
	snap, err := s.merge(ctx, from, to)
	if err != nil {
		return fmt.Errorf("merge the memory layers of snapshot %d: %w", from, err)
	}
	recorded := false
	s.do(func() {
		switch s.state() {
		case Paused, Resuming, Running:
			if s.rec.Generation == from {
				err = s.amend(func(r *store.Sandbox) { r.Generation = to })
				recorded = err == nil
			}
		default: // a newer one is in the making, or the end
		}
		if recorded {
			s.snapshotBytes = snap.AllocatedBytes()
			s.publish()
		}
	})
	if !recorded {
		return errors.Join(err, s.m.snaps.Remove(snap.Dir))
	}
	return s.removeOldGenerations()
}

func (s *Sandbox) mergeable(generation uint64) bool {
	snap, err := s.load(generation)
	if err != nil || slices.Contains(snap.Manifest.Memory, oldMemoryFile) {
		return false
	}
	var sizes []uint64
	for _, name := range snap.Manifest.Memory {
		sizes = append(sizes, snapcache.Allocated(snap.Path(name)))
	}
	return worthMerging(sizes)
}

func (s *Sandbox) merge(ctx context.Context, from, to uint64) (*snapcache.Snapshot, error) {
	old, err := s.load(from)
	if err != nil {
		return nil, err
	}
	draft, err := s.m.snaps.Begin(s.paths.generation(to))
	if err != nil {
		return nil, err
	}
	snap, err := fillMerged(ctx, draft, old, to)
	if err != nil {
		return nil, errors.Join(err, draft.Discard())
	}
	return snap, nil
}

func fillMerged(ctx context.Context, draft *snapcache.Draft, old *snapcache.Snapshot, to uint64) (*snapcache.Snapshot, error) {
	m := old.Manifest
	shared := []string{stateFile}
	if m.Base != "" {
		shared = append(shared, m.Base)
	}
	for _, name := range shared {
		if err := draft.Link(old, name, name); err != nil {
			return nil, err
		}
	}
	name := memoryName(to, m.MemoryFiles())
	sum, err := draft.MergeMemory(ctx, old, name)
	if err != nil {
		return nil, err
	}
	m.Generation, m.Merged, m.Memory = to, old.Manifest.Generation, []string{name}
	return draft.Publish(m, map[string]snapcache.Sum{name: sum})
}
