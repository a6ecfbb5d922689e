package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"torpor/agent/snapcache"
	"torpor/agent/store"
	"torpor/api/apierr"
	"torpor/api/vmmpb"
)

// pausePlan is everything one pause needs.
type pausePlan struct {
	dir      string // of the new generation
	manifest snapcache.Manifest
	drained  <-chan struct{}
}

// Pause writes a snapshot and lets the VM go. It answers when the snapshot is published; a pause under way is joined.
// already_paused if it is paused; an error otherwise means that the sandbox goes on as if nothing had happened.
func (s *Sandbox) Pause(ctx context.Context) (View, error) {
	result := make(chan error, 1)
	var refused error
	ran := s.do(func() {
		if refused = s.askPause(); refused == nil {
			s.pausers = append(s.pausers, result)
		}
	})
	switch {
	case !ran:
		return View{}, notFound(s.id)
	case refused != nil:
		return View{}, refused
	}
	select {
	case err := <-result:
		if err != nil {
			return View{}, err
		}
		return s.View(), nil
	case <-ctx.Done():
		return View{}, apierr.New(apierr.InTransition, "the sandbox is still pausing; look at its state").For(s.id)
	}
}

// askPause begins a pause or finds one to join. Owner only.
func (s *Sandbox) askPause() error {
	switch s.state() {
	case Running:
		return s.beginPause("paused by request")
	case Pausing:
		return nil
	case Paused:
		return s.fail(apierr.AlreadyPaused, "the sandbox is already paused")
	case Creating, Resuming:
		return s.fail(apierr.InTransition, "the sandbox is %s; pause it when it runs", s.rec.State)
	case Stopping:
		return s.fail(apierr.Deleting, "the sandbox is being killed")
	default:
		if s.rec.Generation > 0 {
			return s.fail(apierr.AlreadyPaused, "the sandbox does not run (%s) and its last snapshot is kept", s.rec.Reason)
		}
		return s.fail(apierr.NotFound, "the sandbox does not run (%s) and has no snapshot", s.rec.Reason)
	}
}

// beginPause starts a pause. Owner only; the sandbox must be running and no operation under way.
func (s *Sandbox) beginPause(reason string) error {
	if s.m.ctx.Err() != nil {
		return errDraining.For(s.id)
	}
	if s.deferPause() {
		return nil
	}
	if err := s.m.checkSpace(); err != nil {
		return apierr.As(err).For(s.id).With(s.rec.State, string(s.envd.State))
	}
	if err := s.move(transition{to: Pausing, reason: reason}); err != nil {
		return err
	}
	s.deadline.stop()
	l := s.live
	l.monitor.cancel()
	drained := make(chan struct{})
	if l.inflight == 0 {
		close(drained)
	} else {
		l.drained = drained
	}
	r := s.rec.Clone()
	plan := pausePlan{
		dir:     s.paths.generation(r.Generation + 1),
		drained: drained,
		manifest: snapcache.Manifest{
			Kind: "generation", Owner: s.id, Generation: r.Generation + 1, Incarnation: r.Incarnation, Parent: r.TemplateDigest,
			Layers: r.Layers, VCPUs: r.VCPUs, MemoryBytes: r.MemoryBytes, DiskBytes: r.DiskBytes, EnvdVersion: r.EnvdVersion,
			CreatedAt: now(),
		},
	}
	s.begin(func(ctx context.Context, op *operation) { s.runPause(ctx, op, l, plan) })
	return nil
}

// runPause is the operation.
func (s *Sandbox) runPause(ctx context.Context, op *operation, l *live, plan pausePlan) {
	times := phases{}
	at := time.Now()
	<-l.monitor.done
	select {
	case <-plan.drained:
	case <-time.After(s.m.cfg.Budgets.PauseGrace): // those still in flight freeze with the VM
	case <-ctx.Done():
	}
	at = times.add("drain", at)
	err := s.snapshot(ctx, op, l, plan, times, at)
	if err != nil {
		s.undoPause(op, l, because(ctx, err))
		return
	}
	// The snapshot is published and recorded: the VM has nothing left to lose, and only now do requests in flight end.
	stopCtx, cancel := context.WithTimeout(s.m.undying, s.m.cfg.Budgets.Quit+s.m.cfg.Budgets.Kill)
	if err := l.vm.Stop(stopCtx, s.m.cfg.Budgets.Quit); err != nil {
		s.log.Warn().Err(err).Msg("stopping the VMM of a paused sandbox")
	}
	cancel()
	err = s.tearDown(l.vm)
	s.do(func() { s.opEnded(op, err) })
}

// snapshot pauses the VM, saves it, publishes the generation, and has the owner record it.
func (s *Sandbox) snapshot(ctx context.Context, op *operation, l *live, plan pausePlan, times phases, at time.Time) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err := s.pauseVM(ctx, l.vm); err != nil {
		return err
	}
	at = times.add("pause", at)
	draft, err := snapcache.Begin(plan.dir)
	if err != nil {
		return err
	}
	if err := s.save(ctx, l.vm, draft); err != nil {
		return errors.Join(err, draft.Discard())
	}
	at = times.add("save", at)
	snap, err := draft.Publish(plan.manifest)
	if err != nil {
		return errors.Join(err, draft.Discard())
	}
	times.add("publish", at)
	size := snap.AllocatedBytes()
	err = s.step(op, func() error { return s.paused(plan.manifest.Generation, size, times) })
	if err != nil {
		return errors.Join(err, snapcache.Remove(plan.dir))
	}
	return nil
}

func (s *Sandbox) pauseVM(ctx context.Context, vm VM) error {
	budget, cancel := context.WithTimeout(ctx, s.m.cfg.Budgets.Pause)
	defer cancel()
	if _, err := vm.Pause(budget, &vmmpb.PauseRequest{}); err != nil {
		return fmt.Errorf("pause the VM: %w", err)
	}
	return nil
}

func (s *Sandbox) save(ctx context.Context, vm VM, draft *snapcache.Draft) error {
	budget, cancel := context.WithTimeout(ctx, s.m.cfg.Budgets.Save)
	defer cancel()
	req := &vmmpb.SaveRequest{Kind: vmmpb.SaveKind_SAVE_KIND_CUMULATIVE, State: draft.Path(stateFile), Memory: draft.Path(diffFile)}
	if _, err := vm.Save(budget, req); err != nil {
		return fmt.Errorf("save the VM: %w", err)
	}
	return nil
}

// paused records a published generation. Owner only.
func (s *Sandbox) paused(generation, size uint64, times phases) error {
	err := s.move(transition{to: Paused, reason: s.rec.Reason, phases: times, change: func(r *store.Sandbox) {
		r.Generation, r.EndAt, r.Proc = generation, now(), store.Proc{}
	}})
	if err != nil {
		return err
	}
	s.stopServing()
	s.snapshotBytes, s.resident = size, 0
	s.publish()
	s.settlePausers(nil)
	return nil
}

// undoPause runs the VM on after a pause that failed before its snapshot was recorded.
func (s *Sandbox) undoPause(op *operation, l *live, cause error) {
	if killed := s.step(op, func() error { return nil }); killed != nil {
		s.do(func() { s.op = nil }) // the VM and the files are the kill's
		return
	}
	ctx, cancel := context.WithTimeout(s.m.undying, s.m.cfg.Budgets.Pause)
	defer cancel()
	_, err := l.vm.Resume(ctx, &vmmpb.ResumeRequest{})
	s.do(func() {
		if s.op != op {
			return
		}
		s.op = nil
		if s.state() == Stopping {
			return
		}
		if err != nil {
			s.bury(pauseEnd(l, cause, err))
			return
		}
		s.runOn(l, cause)
	})
}

func pauseEnd(l *live, cause, err error) string {
	if l.failure != "" {
		return l.failure
	}
	return fmt.Sprintf("pause failed (%v), and the VM could not be run on: %v", cause, err)
}

// runOn makes a sandbox whose pause failed a running one again. Owner only.
func (s *Sandbox) runOn(l *live, cause error) {
	byDeadline := !now().Before(s.rec.EndAt)
	s.settle(transition{to: Running, reason: "the pause failed and the sandbox goes on: " + cause.Error()})
	l.drained = nil
	s.watchEnvd(l)
	s.settlePausers(s.pauseError(cause))
	if s.envd.State == Ready {
		s.settleWaiters(nil)
	}
	if byDeadline {
		s.retryExpiry()
	} else {
		s.armAt(s.rec.EndAt)
	}
	if l.failure != "" { // the VM ended although it resumed
		s.bury(l.failure)
	}
}

// pauseError is what the callers of a failed pause are told. Owner only.
func (s *Sandbox) pauseError(cause error) *apierr.Error {
	switch {
	case errors.Is(cause, errDraining):
		return errDraining.For(s.id)
	case errors.Is(cause, syscall.ENOSPC), isCode(cause, apierr.DiskFull):
		return s.fail(apierr.DiskFull, "the sandbox runs on: there is no room for its snapshot: %w", cause)
	default:
		return s.fail(apierr.NotReady, "the sandbox runs on: it could not be paused, try again: %w", cause)
	}
}

// settlePausers answers everybody who waits for the pause. Owner only.
func (s *Sandbox) settlePausers(failure *apierr.Error) {
	for _, p := range slices.Concat(s.pausers) {
		if failure != nil {
			p <- failure
		} else {
			p <- nil
		}
	}
	s.pausers = nil
	if failure != nil {
		s.failRollback(failure)
	}
}
