package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"torpor/agent/store"
	"torpor/api/vmmpb"
)

// maxTops is how many tops the disks of one VM get before it is ended at a pause: it has all its layers open, and reads look
// into every one.
const maxTops = 8

// frozen is a VM that is kept after a pause: its generation is published and none of what that consists of is its to write any
// more, so it may be ended, and may end, at any moment. It wakes where it stopped.
type frozen struct {
	l      *live
	top    string   // the layer its disk writes to from now on, still empty
	layers []string // those below
	since  time.Time
	timer  *time.Timer // ends it by age
}

func (f *frozen) stop() { f.timer.Stop() }

// freeze keeps the VM of a sandbox that has been paused. Owner only.
func (s *Sandbox) freeze(l *live, plan pausePlan) {
	f := &frozen{l: l, top: plan.top, layers: plan.layers, since: time.Now()}
	f.timer = time.AfterFunc(s.m.cfg.FrozenFor, func() {
		s.do(func() {
			if s.frozen == f {
				s.demote("it was frozen for " + s.m.cfg.FrozenFor.String())
			}
		})
	})
	if l.contact != nil {
		l.contact.Close() // the guest finds its connections ended, as after a restore
		l.contact = nil
	}
	s.op, s.frozen = nil, f
	s.publish()
	switch {
	case l.failure != "":
		s.demote(l.failure)
	case s.rollback != nil:
		s.demote("it is rolled back")
	}
}

// demote ends a frozen VM; the sandbox is then paused on disk. It returns what can be waited for. Owner only; the sandbox must be
// frozen.
func (s *Sandbox) demote(reason string) (ended <-chan struct{}) {
	f := s.frozen
	f.stop()
	s.frozen, s.resident = nil, 0
	s.tierEvent(reason)
	s.begin(func(_ context.Context, op *operation) {
		err := errors.Join(s.tearDown(f.l.vm), s.removeTop(f.top))
		s.do(func() { s.opEnded(op, err) })
	})
	return s.op.done
}

// tierEvent records that a frozen sandbox is one on disk. Owner only.
func (s *Sandbox) tierEvent(reason string) {
	event := store.Event{At: now(), Type: "tier", From: TierFrozen, To: TierDisk, Reason: reason, Incarnation: s.rec.Incarnation}
	rec := s.rec.Clone()
	rec.Proc = store.Proc{}
	if err := s.m.cfg.Store.Put(s.m.undying, rec, event); err != nil {
		s.log.Error().Err(err).Msg("a change of tier is not recorded")
	}
	s.become(rec, s.envd, []store.Event{event})
}

// wakeFrozen runs the frozen VM on, if there is one and the start may use it, in a new incarnation: the guest's monotonic clock
// goes on from where it stopped, and everything else it is told in the handshake, as after a restore. A VM that cannot be
// woken is gone, and the plan has another top.
func (s *Sandbox) wakeFrozen(ctx context.Context, op *operation, plan *startPlan, times phases) (*live, error) {
	f := plan.frozen
	if f == nil {
		return nil, nil
	}
	if plan.sources[0].mode == ModeCold {
		return nil, errors.Join(s.tearDown(f.l.vm), s.step(op, func() error { s.vm = nil; return nil }), s.removeTop(f.top))
	}
	at := time.Now()
	l, err := s.thaw(ctx, op, f, plan, times, at)
	if err == nil {
		return l, nil
	}
	err = errors.Join(err, s.tearDown(f.l.vm), s.removeTop(f.top))
	changed := s.step(op, func() error {
		s.vm = nil
		return s.amend(func(r *store.Sandbox) {
			plan.top = layerName(r.NextLayer)
			r.Layers[len(r.Layers)-1], r.NextLayer, r.Proc = plan.top, r.NextLayer+1, store.Proc{}
		})
	})
	return nil, errors.Join(err, changed)
}

func (s *Sandbox) thaw(ctx context.Context, op *operation, f *frozen, plan *startPlan, times phases, at time.Time) (*live, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	budget, cancel := context.WithTimeout(ctx, s.m.cfg.Budgets.Pause)
	defer cancel()
	if _, err := f.l.vm.Resume(budget, &vmmpb.ResumeRequest{}); err != nil {
		return nil, fmt.Errorf("run the VM on: %w", err)
	}
	at = times.add("thaw", at)
	err := s.step(op, func() error {
		s.setEnvd(s.envd.as(Starting), "the VM runs", nil)
		return nil
	})
	if err != nil {
		return nil, err
	}
	l := &live{vm: f.l.vm, guest: f.l.guest, incarnation: plan.incarnation, done: make(chan struct{}), tops: f.l.tops}
	if err := s.greet(ctx, l, plan.handshake, times, at); err != nil {
		return nil, err
	}
	return l, nil
}

// Demote ends the VM of a frozen sandbox and returns when it is gone; false if it is not frozen.
func (s *Sandbox) Demote(reason string) bool {
	var ended <-chan struct{}
	s.do(func() {
		if s.frozen != nil {
			ended = s.demote(reason)
		}
	})
	if ended == nil {
		return false
	}
	<-ended
	return true
}
