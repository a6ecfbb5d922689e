package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"torpor/agent/snapcache"
	"torpor/agent/store"
	"torpor/api/apierr"
)

// rollback is a way back to a kept snapshot that somebody waits for.
type rollback struct {
	id     string
	snap   *snapcache.Snapshot
	layers []string   // what its disk layers are called here; they are there before they are recorded
	wake   *waiter    // enlisted when it is done; nil if the sandbox did not run
	result chan error // capacity 1, written once
}

// Rollback takes a sandbox back to a kept snapshot of its own, memory and disk: the snapshot becomes its newest generation. What
// it was before is the generation before that, until the one after has run; a sandbox that runs is paused for it, and runs again
// when Rollback returns. A paused one stays paused, and one whose run ended or whose files are damaged becomes paused.
// The cost is that of some links, however old the snapshot is.
func (m *Manager) Rollback(ctx context.Context, sandboxID, snapshotID string) (View, error) {
	s, err := m.Get(sandboxID)
	if err != nil {
		return View{}, err
	}
	snap, release, err := m.cfg.Kept.Take(snapshotID)
	if err != nil {
		return View{}, err
	}
	defer release()
	if snap.Manifest.Owner != sandboxID { // not told from one that does not exist
		return View{}, apierr.New(apierr.NotFound, "there is no snapshot %q", snapshotID)
	}
	return s.back(ctx, &rollback{id: snapshotID, snap: snap, result: make(chan error, 1)})
}

func (s *Sandbox) back(ctx context.Context, r *rollback) (View, error) {
	var refused error
	if !s.do(func() { refused = s.askRollback(ctx, r) }) {
		return View{}, notFound(s.id)
	}
	if refused != nil {
		return View{}, refused
	}
	if err := <-r.result; err != nil { // it comes whatever happens: r's snapshot is in use until then
		return View{}, err
	}
	if r.wake != nil {
		if err := s.await(ctx, r.wake); err != nil {
			return View{}, err
		}
	}
	return s.View(), nil
}

// askRollback begins a rollback, or a pause after which it begins. Owner only.
func (s *Sandbox) askRollback(ctx context.Context, r *rollback) error {
	if s.rollback != nil {
		return s.fail(apierr.InTransition, "the sandbox is being rolled back already")
	}
	if s.m.ctx.Err() != nil {
		return errDraining.For(s.id)
	}
	switch s.state() {
	case Creating, Resuming:
		return s.fail(apierr.InTransition, "the sandbox is %s; roll it back when it runs", s.rec.State)
	case Stopping:
		return notFound(s.id)
	case Running:
		left := max(time.Second, s.rec.EndAt.Sub(now())) // the deadline is not moved
		r.wake = newWaiter(ctx, "it was rolled back while it ran", left)
		if err := s.beginPause("paused to be rolled back"); err != nil {
			return err
		}
	case Pausing:
	default:
		if s.frozen != nil {
			s.demote("it is rolled back")
		}
		if s.op == nil {
			s.rollback = r
			s.beginRollback()
			return nil
		}
	}
	s.rollback = r // opEnded begins it
	return nil
}

// failRollback answers whoever waits for a rollback that will not come about. Owner only.
func (s *Sandbox) failRollback(failure *apierr.Error) {
	if s.rollback != nil {
		s.rollback.result <- failure
		s.rollback = nil
	}
}

// beginRollback makes the snapshot the newest generation. Owner only; nothing runs and no operation is under way.
func (s *Sandbox) beginRollback() {
	r := s.rollback
	generation := s.rec.NextGen
	layers := layerNames(len(r.snap.Manifest.Layers), s.rec.NextLayer)
	r.layers = layers
	err := s.amend(func(rec *store.Sandbox) { // none is ever used twice
		rec.NextLayer += uint64(len(layers))
		rec.NextGen++
	})
	if err != nil {
		s.rollbackEnded(r, fmt.Errorf("record the new layers: %w", err))
		return
	}
	s.begin(func(_ context.Context, op *operation) {
		snap, err := s.plant(r.snap, generation, layers)
		if err == nil {
			err = s.step(op, func() error { return s.rolledBack(r, snap, layers) })
			if err != nil {
				err = errors.Join(err, snapcache.Cache{FS: s.m.cfg.FS}.Remove(snap.Dir))
			}
		}
		s.do(func() {
			if s.op == op {
				s.op = nil
				s.rollbackEnded(r, err)
			}
		})
	})
}

// rolledBack records the generation that was made of a snapshot. Owner only.
func (s *Sandbox) rolledBack(r *rollback, snap *snapcache.Snapshot, layers []string) error {
	err := s.move(transition{to: Paused, reason: "rolled back to snapshot " + r.id, change: func(rec *store.Sandbox) {
		rec.Generation, rec.Layers = snap.Manifest.Generation, slices.Clone(layers)
	}})
	if err != nil {
		return err
	}
	s.snapshotBytes = snap.AllocatedBytes()
	s.publish()
	return nil
}

// rollbackEnded answers whoever asked, and wakes the sandbox if it ran or somebody waits for it. Owner only.
func (s *Sandbox) rollbackEnded(r *rollback, err error) {
	if s.rollback != r {
		return // a kill has answered already
	}
	s.rollback = nil
	if r.wake != nil {
		s.waiters = append(s.waiters, r.wake) // also if it failed: the sandbox ran, and goes on as it was
	}
	if err == nil {
		r.result <- nil
	} else {
		r.result <- s.fail(apierr.NotReady, "the sandbox could not be rolled back and is as it was: %w", err)
	}
	s.wakeIfWanted()
}
