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
	rec      store.Sandbox // as it was before the pause
	number   uint64        // of the new generation
	layers   []string      // disk layers that it consists of
	top      string        // layer the disk gets when that is saved; empty: none, the VM is ended
	tops     int           // how many the VM has had before
	resident uint64        // memory of the VM, as last seen
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
	plan := pausePlan{rec: s.rec.Clone(), number: s.rec.NextGen, layers: slices.Clone(s.rec.Layers), resident: s.resident, tops: s.live.tops}
	plan.rec.Layers = plan.layers
	if s.m.cfg.FrozenFor > 0 && s.live.tops < maxTops && !s.live.unsure {
		plan.top = layerName(s.rec.NextLayer)
	}
	err := s.move(transition{to: Pausing, reason: reason, change: func(r *store.Sandbox) {
		r.NextGen++
		if plan.top != "" { // recorded before it is made and before the VM can write to it
			r.NextLayer++
			r.Layers = append(r.Layers, plan.top)
		}
	}})
	if err != nil {
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
	plan.drained = drained
	s.begin(func(ctx context.Context, op *operation) { s.runPause(ctx, op, l, plan) })
	return nil
}

// runPause is the operation.
func (s *Sandbox) runPause(ctx context.Context, op *operation, l *live, plan pausePlan) {
	times := phases{}
	at := time.Now()
	<-l.monitor.done
	gen := s.planGeneration(plan.rec, plan.number)
	err := s.fits(ctx, l, gen, plan.resident)
	if err == nil {
		select {
		case <-plan.drained:
		case <-time.After(s.m.cfg.Budgets.PauseGrace): // those still in flight freeze with the VM
		case <-ctx.Done():
		}
		at = times.add("drain", at)
		err = s.snapshot(ctx, op, l, plan, gen, times, at)
	}
	if err != nil {
		s.undoPause(op, l, plan, because(ctx, err))
		return
	}
	if plan.top != "" {
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

// stateRoom is more than a machine's state and the manifest take.
const stateRoom = 1 << 20

// fits refuses a pause whose snapshot may not find room, while nothing has been done to the VM.
func (s *Sandbox) fits(ctx context.Context, l *live, gen generationPlan, resident uint64) error {
	if seen := s.residentBytes(ctx, l); seen > 0 {
		resident = seen
	}
	return s.m.checkRoom(gen.needs(resident) + stateRoom)
}

// snapshot pauses the VM, saves it, publishes the generation, and has the owner record it. What can be done before the VM
// stands still is done before.
func (s *Sandbox) snapshot(ctx context.Context, op *operation, l *live, plan pausePlan, gen generationPlan, times phases, at time.Time) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	draft, err := gen.begin(s.m.snaps)
	if err != nil {
		return err
	}
	if plan.top != "" {
		if err := s.makeTop(plan.top, plan.rec.DiskBytes); err != nil {
			return errors.Join(err, draft.Discard())
		}
	}
	at = times.add("prepare", at)
	if err := s.pauseVM(ctx, l.vm); err != nil {
		return errors.Join(err, draft.Discard())
	}
	at = times.add("pause", at)
	saved, err := s.save(ctx, l, draft, plan, gen)
	if err != nil {
		return errors.Join(err, draft.Discard())
	}
	at = times.add("save", at)
	snap, err := draft.Publish(gen.manifest, gen.sums(saved))
	if err != nil {
		return errors.Join(err, draft.Discard())
	}
	times.add("publish", at)
	size := snap.AllocatedBytes()
	err = s.step(op, func() error { return s.paused(l, plan, size, times) })
	if err != nil {
		return errors.Join(err, s.m.snaps.Remove(gen.dir))
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

// save has the VMM write. A save that the VMM refused has not changed the disk's top; after one that was not answered nobody knows.
func (s *Sandbox) save(ctx context.Context, l *live, draft *snapcache.Draft, plan pausePlan, gen generationPlan) (*vmmpb.SaveResponse, error) {
	budget, cancel := context.WithTimeout(ctx, s.m.cfg.Budgets.Save)
	defer cancel()
	req := &vmmpb.SaveRequest{Kind: gen.kind, State: draft.Path(stateFile), Memory: draft.Path(gen.file)}
	if plan.top != "" {
		req.Tops = []string{s.paths.layer(plan.top)}
	}
	saved, err := l.vm.Save(budget, req)
	if plan.top != "" {
		_, refused := errors.AsType[*apierr.Error](err)
		switch {
		case err == nil:
			l.tops++
		case !refused:
			l.unsure = true
		}
	}
	if err != nil {
		return nil, fmt.Errorf("save the VM: %w", err)
	}
	return saved, nil
}

// paused records a published generation. Owner only.
func (s *Sandbox) paused(l *live, plan pausePlan, size uint64, times phases) error {
	err := s.move(transition{to: Paused, reason: s.rec.Reason, phases: times, change: func(r *store.Sandbox) {
		r.Generation, r.Layers, r.EndAt = plan.number, plan.layers, now()
		if plan.top == "" {
			r.Proc = store.Proc{}
		}
	}})
	if err != nil {
		return err
	}
	s.stopServing()
	s.snapshotBytes = size
	if plan.top == "" {
		s.resident = 0
		s.publish()
	} else {
		s.freeze(l, plan)
	}
	s.settlePausers(nil)
	switch {
	case s.op != nil: // a VM ends; opEnded goes on
	case s.rollback != nil:
		s.demote("it is rolled back")
	default:
		s.wakeIfWanted()
	}
	return nil
}

// undoPause runs the VM on after a pause that failed before its snapshot was recorded.
func (s *Sandbox) undoPause(op *operation, l *live, plan pausePlan, cause error) {
	if killed := s.step(op, func() error { return nil }); killed != nil {
		s.do(func() { s.op = nil }) // the VM and the files are the kill's
		return
	}
	ctx, cancel := context.WithTimeout(s.m.undying, s.m.cfg.Budgets.Pause)
	defer cancel()
	_, err := l.vm.Resume(ctx, &vmmpb.ResumeRequest{})
	unused := plan.top != "" && l.tops == plan.tops && !l.unsure
	if unused {
		cause = errors.Join(cause, s.removeTop(plan.top))
	}
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
		s.runOn(l, plan, unused, cause)
	})
}

func pauseEnd(l *live, cause, err error) string {
	if l.failure != "" {
		return l.failure
	}
	return fmt.Sprintf("pause failed (%v), and the VM could not be run on: %v", cause, err)
}

// runOn makes a sandbox whose pause failed a running one again. Owner only.
func (s *Sandbox) runOn(l *live, plan pausePlan, unused bool, cause error) {
	byDeadline := !now().Before(s.rec.EndAt)
	s.settle(transition{to: Running, reason: "the pause failed and the sandbox goes on: " + cause.Error(), change: func(r *store.Sandbox) {
		if unused {
			r.Layers = plan.layers
		}
	}})
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
