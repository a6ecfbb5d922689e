package sandbox

import (
	"context"
	"fmt"
	"time"

	"torpor/agent/store"
	"torpor/api/apierr"
)

// Kill ends the sandbox in any state and removes its files; it returns when they are gone. It goes on when ctx ends.
func (s *Sandbox) Kill(ctx context.Context, reason string) error {
	var refused error
	if !s.do(func() { refused = s.beginKill(reason) }) {
		return nil // gone already
	}
	if refused != nil {
		return refused
	}
	select {
	case <-s.gone:
		return nil
	case <-ctx.Done():
		return apierr.New(apierr.Deleting, "the sandbox is still being removed").For(s.id)
	}
}

// beginKill makes the end inevitable. Owner only.
func (s *Sandbox) beginKill(reason string) error {
	if s.state() == Stopping {
		return nil
	}
	if err := s.move(transition{to: Stopping, reason: reason}); err != nil {
		return err
	}
	s.end()
	return nil
}

// end carries out the end of a sandbox that is stopping. Owner only.
func (s *Sandbox) end() {
	s.stopServing()
	if s.frozen != nil {
		s.frozen.stop()
		s.frozen = nil // its VM is ended with the rest
	}
	deleting := s.fail(apierr.Deleting, "the sandbox is being killed")
	s.settleWaiters(deleting)
	s.settlePausers(deleting)
	op, tidying := s.op, s.tidying
	if op != nil {
		op.cancel(errKilled)
	}
	if tidying != nil {
		tidying.cancel()
	}
	s.work.Go(func() { s.runKill(op, tidying) })
}

// runKill waits for the work under way, ends the VM, removes the files, and has the owner end. It gives up only when
// the agent ends; the next one goes on, since stopping is recorded.
func (s *Sandbox) runKill(op *operation, tidying *task) {
	if op != nil {
		<-op.done
	}
	if tidying != nil {
		<-tidying.done
	}
	b := s.m.cfg.Budgets
	for pause := b.RetryMin; ; pause = min(2*pause, b.RetryMax) {
		err := s.removeAll()
		if err == nil {
			return
		}
		s.log.Error().Err(err).Msg("removing a killed sandbox; trying again")
		select {
		case <-time.After(pause):
		case <-s.m.ctx.Done():
			return
		}
	}
}

func (s *Sandbox) removeAll() error {
	var vm VM
	if !s.do(func() { vm = s.vm }) {
		return nil
	}
	if vm != nil {
		if err := s.tearDown(vm); err != nil {
			return err
		}
	}
	if err := s.m.cfg.FS.RemoveAll(s.paths.dir); err != nil {
		return fmt.Errorf("remove the files: %w", err)
	}
	var err error
	s.do(func() { err = s.removed() })
	return err
}

// removed leaves nothing of the sandbox but the memory of it. Owner only.
func (s *Sandbox) removed() error {
	err := s.move(transition{to: Stopped, reason: s.rec.Reason, change: func(r *store.Sandbox) {
		r.RemovedAt, r.EndAt, r.Proc = now(), now(), store.Proc{}
		r.Token, r.Env, r.Layers, r.Generation = "", nil, nil, 0
	}})
	if err != nil {
		return err
	}
	s.vm, s.ended = nil, true
	s.m.forget(s)
	return nil
}
