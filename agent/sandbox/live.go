package sandbox

import (
	"context"
	"errors"
	"time"

	"torpor/agent/store"
	"torpor/api/apierr"
	"torpor/api/vmmpb"
)

// live is a VM that serves (or is about to), in one incarnation. Its fields are the owner's but for the first three.
type live struct {
	vm          VM
	guest       Guest
	incarnation uint64

	contact  Contact // nil while there is none
	latency  time.Duration
	done     chan struct{} // closed when leases end
	inflight int           // leases given
	drained  chan struct{} // not nil while a pause waits for them; closed when inflight is 0
	monitor  *task
	failure  string // why the VM has ended, when that came during an operation
	tops     int    // how many tops its disks have got while it runs
	unsure   bool   // which of the newest disk layers it writes to is not known for certain
}

// task is a goroutine that can be ended.
type task struct {
	cancel context.CancelFunc
	done   chan struct{}
}

func (s *Sandbox) goTask(run func(ctx context.Context)) *task {
	ctx, cancel := context.WithCancel(s.m.ctx)
	t := &task{cancel: cancel, done: make(chan struct{})}
	s.work.Go(func() {
		defer close(t.done)
		defer cancel()
		run(ctx)
	})
	return t
}

// whileLives returns a context that ends with the VM's process too: nobody else would answer. release lets go of it.
func whileLives(ctx context.Context, vm VM) (_ context.Context, release func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		select {
		case <-vm.Done():
			cancel(errors.New("the VMM ended: " + vm.Ended()))
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil); <-watched }
}

// serve makes l the VM of this sandbox and begins to watch it. Owner only.
func (s *Sandbox) serve(l *live) {
	s.live, s.vm = l, l.vm
	s.work.Go(func() { s.watchVM(l) })
	s.watchEnvd(l)
}

// stopServing ends every lease. Owner only.
func (s *Sandbox) stopServing() {
	if s.live == nil {
		return
	}
	s.live.monitor.cancel()
	close(s.live.done)
	s.live = nil
	s.deadline.stop()
}

// watchVM reports the end of the guest or of the VMM process. It ends with them, or with the agent.
func (s *Sandbox) watchVM(l *live) {
	ended, err := l.vm.Wait(s.m.ctx, &vmmpb.WaitRequest{})
	if s.m.ctx.Err() != nil {
		return
	}
	reason := ""
	if err == nil {
		reason = "the guest ended: " + ended.Reason
		if ended.Detail != "" {
			reason += " (" + ended.Detail + ")"
		}
		s.log.Info().Str("reason", ended.Reason).Str("detail", ended.Detail).Bytes("console", ended.ConsoleTail).Msg("the guest ended")
	} else {
		// The connection is gone, which normally means that the process is. One that lives on without answering is of no use.
		select {
		case <-l.vm.Done():
			reason = "the VMM ended: " + l.vm.Ended()
		case <-s.m.ctx.Done():
			return
		case <-time.After(s.m.cfg.Budgets.Quit):
			reason = "the VMM does not answer any more: " + err.Error()
		}
	}
	s.do(func() { s.vmEnded(l, reason) })
}

// vmEnded makes a sandbox whose VM has ended a stopped one. Owner only.
func (s *Sandbox) vmEnded(l *live, reason string) {
	if s.frozen != nil && s.frozen.l == l {
		s.demote(reason) // it had nothing left to lose
		return
	}
	if s.live != l || s.state() == Stopping {
		return
	}
	if s.op != nil {
		l.failure = reason // a pause is under way: it fails, and ends here too
		return
	}
	s.bury(reason)
}

// bury ends a run that ended by itself. Owner only; no operation may be under way.
func (s *Sandbox) bury(reason string) {
	s.stopServing()
	s.settle(transition{to: Stopped, reason: reason, change: runEnded})
	s.settlePausers(s.fail(apierr.NotReady, "the sandbox stopped while it was pausing: %s", reason))
	s.settleWaiters(s.fail(apierr.NotReady, "the sandbox stopped: %s", reason))
	vm := s.vm
	s.begin(func(_ context.Context, op *operation) {
		err := s.tearDown(vm)
		s.do(func() { s.opEnded(op, err) })
	})
}

// runEnded is what changes in the record when a run has ended without a snapshot.
func runEnded(r *store.Sandbox) { r.EndAt, r.Proc = now(), store.Proc{} }

// opEnded ends an operation after which no VM is left, and wakes the sandbox again if somebody waits for it. Owner only.
func (s *Sandbox) opEnded(op *operation, err error) {
	if s.op != op {
		return
	}
	s.op, s.vm = nil, nil
	if err != nil {
		s.log.Error().Err(err).Msg("clearing up after a VM")
	}
	if s.rollback != nil && s.state() != Stopping {
		s.beginRollback()
		return
	}
	s.wakeIfWanted()
}

// wakeIfWanted wakes a sandbox that does not run if somebody waits for it, and otherwise clears up. Owner only; no operation may be under way.
func (s *Sandbox) wakeIfWanted() {
	if s.state() == Stopping {
		return
	}
	if !s.waitersLeft() {
		s.tidy()
		return
	}
	if err := s.beginResume(s.waiters[0]); err != nil {
		s.settleWaiters(apierr.As(err))
	}
}

// tearDown ends a VMM whatever it takes: until it is gone no other may be started for this sandbox. It gives up only when
// the agent ends, which leaves the process to the next one.
func (s *Sandbox) tearDown(vm VM) error {
	for pause := s.m.cfg.Budgets.RetryMin; ; pause = min(2*pause, s.m.cfg.Budgets.RetryMax) {
		ctx, cancel := context.WithTimeout(s.m.undying, s.m.cfg.Budgets.Kill)
		err := vm.Kill(ctx)
		cancel()
		if err == nil {
			return s.m.cfg.VMMs.Clear(s.id)
		}
		s.log.Error().Err(err).Msg("the VMM does not end")
		select {
		case <-time.After(pause):
		case <-s.m.ctx.Done():
			return errors.Join(err, errDraining)
		}
	}
}
