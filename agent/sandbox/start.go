package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"torpor/agent/guest"
	"torpor/agent/snapcache"
	"torpor/agent/store"
	"torpor/agent/template"
	"torpor/api/apierr"
	"torpor/api/guestpb"
	"torpor/api/vmmpb"
)

// guestCID is the vsock address of every guest: each has a device of its own, so the number need not be unique.
const guestCID = 3

// consoleBytes bounds the kept serial output of a sandbox.
const consoleBytes = 256 << 10

// startPlan is everything one start needs; the operation reads nothing of the owner's.
type startPlan struct {
	template    *template.Template // nil: looked up by digest
	digest      string
	from        VMState             // what it was; empty for a create
	generation  uint64              // 0: start from the template itself
	origin      *snapcache.Snapshot // what the generation is to be made from first; nil: it is there
	frozen      []string            // layers below the new top; nil with a generation: those of its manifest
	top         string
	diskBytes   uint64
	incarnation uint64
	handshake   *guestpb.HandshakeRequest
	queued      time.Time // when the first request for this start came
}

// beginCreate records the sandbox and starts it from a template, or from a snapshot, which becomes its first generation. Owner only.
func (s *Sandbox) beginCreate(from origin, queued time.Time) error {
	reason, frozen, generation := "created from template "+from.template.ID, []string{}, uint64(0)
	if from.snap != nil {
		reason = "created from a snapshot of sandbox " + from.snap.Manifest.Owner
		frozen, generation = layerNames(len(from.snap.Manifest.Layers), s.rec.NextLayer), 1
	}
	err := s.move(transition{to: Creating, reason: reason, change: func(r *store.Sandbox) {
		r.Incarnation++
		r.NextLayer += uint64(len(frozen))
		r.Layers, r.NextLayer = append(slices.Clone(frozen), layerName(r.NextLayer)), r.NextLayer+1
		r.Generation, r.Proc = generation, store.Proc{}
	}})
	if err != nil {
		return err
	}
	plan := s.plan(queued)
	plan.template, plan.frozen, plan.generation, plan.origin = from.template, frozen, generation, from.snap
	s.begin(func(ctx context.Context, op *operation) { s.runStart(ctx, op, plan) })
	return nil
}

// beginResume starts the sandbox from its newest snapshot. Owner only.
func (s *Sandbox) beginResume(reason string, queued time.Time) error {
	if s.m.ctx.Err() != nil {
		return errDraining.For(s.id)
	}
	if s.rec.Generation == 0 {
		return s.fail(apierr.SandboxBroken, "the sandbox is %s (%s) and has no snapshot to resume from; kill it and create a new one", s.rec.State, s.rec.Reason)
	}
	from := s.state()
	if from != Paused {
		reason = fmt.Sprintf("%s; back to snapshot %d, since the run after it ended: %s", reason, s.rec.Generation, s.rec.Reason)
	}
	var frozen []string
	if from == Paused {
		frozen = slices.Clone(s.rec.Layers) // some may be merged since the manifest was written
	}
	err := s.move(transition{to: Resuming, reason: reason, change: func(r *store.Sandbox) {
		r.Incarnation++
		r.Layers = append(r.Layers, layerName(r.NextLayer))
		r.NextLayer++
		r.Proc = store.Proc{}
	}})
	if err != nil {
		return err
	}
	plan := s.plan(queued)
	plan.from, plan.generation, plan.frozen = from, s.rec.Generation, frozen
	s.begin(func(ctx context.Context, op *operation) { s.runStart(ctx, op, plan) })
	return nil
}

// plan makes a plan out of the record. Owner only.
func (s *Sandbox) plan(queued time.Time) startPlan {
	r := s.rec.Clone()
	return startPlan{
		digest: r.TemplateDigest, top: r.Layers[len(r.Layers)-1], diskBytes: r.DiskBytes,
		incarnation: r.Incarnation, handshake: s.greeting(), queued: queued,
	}
}

// greeting is the handshake of the present incarnation. Owner only.
func (s *Sandbox) greeting() *guestpb.HandshakeRequest {
	r := s.rec.Clone()
	return &guestpb.HandshakeRequest{
		Incarnation: r.Incarnation, Entropy: guest.Entropy(), SandboxId: r.ID, TemplateId: r.TemplateID,
		AccessToken: r.Token, EnvVars: r.Env, DefaultUser: "user", DefaultWorkdir: "/home/user",
	}
}

// runStart is the operation: it brings the VM up to a ready envd and hands it to the owner, or undoes everything.
func (s *Sandbox) runStart(ctx context.Context, op *operation, plan startPlan) {
	times := phases{}
	times.add("queue", plan.queued)
	l, err := s.bringUp(ctx, op, &plan, times)
	times.add("total", plan.queued)
	if err == nil {
		if err = s.step(op, func() error { return s.started(l, plan, times) }); err == nil {
			return
		}
		l.contact.Close()
		err = errors.Join(err, s.tearDown(l.vm))
	}
	err = errors.Join(because(ctx, err), s.removeTop(plan))
	s.do(func() { s.startFailed(op, plan, err) })
}

// because puts the reason an operation was cancelled for, if it was, before what that led to.
func because(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return fmt.Errorf("%w: %w", cause, err)
	}
	return err
}

// removeTop removes the layer a failed start made: nothing of use has been written to it.
func (s *Sandbox) removeTop(plan startPlan) error {
	if err := os.RemoveAll(s.paths.layer(plan.top)); err != nil {
		return fmt.Errorf("remove the new disk layer: %w", err)
	}
	return nil
}

// bringUp does the work of a start. On error the VM it started is gone.
func (s *Sandbox) bringUp(ctx context.Context, op *operation, plan *startPlan, times phases) (_ *live, err error) {
	at := time.Now()
	req, err := s.restoreRequest(ctx, plan)
	if err != nil {
		return nil, err
	}
	at = times.add("prepare", at)

	vm, err := s.startVMM(ctx, op)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.tearDown(vm))
		}
	}()
	at = times.add("vmmStart", at)

	if err := s.restore(ctx, vm, req); err != nil {
		return nil, err
	}
	at = times.add("restore", at)
	err = s.step(op, func() error {
		s.setEnvd(s.envd.as(Starting), "the VM runs", nil)
		return nil
	})
	if err != nil {
		return nil, err
	}

	l := &live{vm: vm, guest: s.m.cfg.Guests(s.m.cfg.VMMs.VsockSocket(s.id)), incarnation: plan.incarnation, done: make(chan struct{})}
	if err := s.greet(ctx, l, plan.handshake, times, at); err != nil {
		return nil, err
	}
	return l, nil
}

// startVMM starts the process and has it recorded before anything else happens with it.
func (s *Sandbox) startVMM(ctx context.Context, op *operation) (VM, error) {
	budget, cancel := context.WithTimeout(ctx, s.m.cfg.Budgets.VMMStart)
	defer cancel()
	vm, err := s.m.cfg.VMMs.Start(budget, s.id, s.paths.vmmLog())
	if err != nil {
		return nil, fmt.Errorf("start the VMM: %w", err)
	}
	err = s.step(op, func() error {
		s.vm = vm
		id := vm.Identity()
		return s.amend(func(r *store.Sandbox) { r.Proc = store.Proc{PID: id.PID, Start: id.Start, Boot: id.Boot} })
	})
	if err != nil {
		return nil, errors.Join(err, s.tearDown(vm))
	}
	return vm, nil
}

// restoreRequest makes the new top layer and names every file of the start.
func (s *Sandbox) restoreRequest(ctx context.Context, plan *startPlan) (*vmmpb.RestoreRequest, error) {
	t := plan.template
	if t == nil {
		var err error
		if t, err = s.m.cfg.Templates.ByDigest(ctx, plan.digest); err != nil {
			return nil, err
		}
	}
	if plan.origin != nil {
		snap, err := s.plant(plan.origin, plan.generation, plan.frozen)
		if err != nil {
			return nil, err
		}
		s.do(func() { s.snapshotBytes = snap.AllocatedBytes() })
	}
	req := &vmmpb.RestoreRequest{
		State: t.Snapshot.Path(template.StateFile), BaseMemory: t.Snapshot.Path(template.MemoryFile), WorkingSet: t.WorkingSet(),
	}
	if plan.generation > 0 {
		snap, err := snapcache.Load(s.paths.generation(plan.generation))
		if err != nil {
			return nil, err
		}
		if snap.Manifest.Parent != t.Digest {
			return nil, apierr.New(apierr.SandboxBroken, "snapshot %d builds on template %s, not on %s", plan.generation, snap.Manifest.Parent, t.Digest)
		}
		if err := snap.Verify(stateFile); err != nil { // small; the memory's chunks are checked by the VMM as it reads them
			return nil, err
		}
		req.State, req.MemoryLayers = snap.Path(stateFile), []string{snap.Path(diffFile)}
		if plan.frozen == nil {
			plan.frozen = snap.Manifest.Layers
		}
	}
	if err := os.MkdirAll(s.paths.layers(), 0o700); err != nil {
		return nil, fmt.Errorf("make the layer directory: %w", err)
	}
	top := s.paths.layer(plan.top)
	if err := os.RemoveAll(top); err != nil { // left by a start of the same number that was cut short
		return nil, fmt.Errorf("make the disk layer: %w", err)
	}
	if err := s.m.cfg.Layers.Create(top, plan.diskBytes); err != nil {
		return nil, fmt.Errorf("make the disk layer: %w", err)
	}
	layers := []string{t.Layer()}
	for _, l := range plan.frozen {
		if _, err := os.Stat(s.paths.layer(l)); err != nil {
			return nil, &snapcache.PartError{Dir: s.paths.dir, Part: l, Reason: "the disk layer cannot be read: " + err.Error()}
		}
		layers = append(layers, s.paths.layer(l))
	}
	req.Machine = t.Machine(layers, top, &vmmpb.Vsock{Cid: guestCID},
		&vmmpb.Console{Enabled: true, Log: s.paths.console(), MaxBytes: consoleBytes})
	return req, nil
}

func (s *Sandbox) restore(ctx context.Context, vm VM, req *vmmpb.RestoreRequest) error {
	budget, cancel := context.WithTimeout(ctx, s.m.cfg.Budgets.Restore)
	defer cancel()
	if _, err := vm.Restore(budget, req); err != nil {
		return fmt.Errorf("restore the VM: %w", err)
	}
	return nil
}

// greet makes envd ready: a handshake, and a probe that proves it over the path of user requests.
func (s *Sandbox) greet(ctx context.Context, l *live, req *guestpb.HandshakeRequest, times phases, at time.Time) error {
	budget, cancel := context.WithTimeoutCause(ctx, s.m.cfg.Budgets.Handshake, errors.New("envd did not answer in time"))
	defer cancel()
	budget, release := whileLives(budget, l.vm)
	defer release()
	contact, err := l.guest.Handshake(budget, req)
	if err != nil {
		return err
	}
	at = times.add("handshake", at)
	latency, err := l.guest.Probe(budget, l.incarnation)
	if err != nil {
		contact.Close()
		return err
	}
	times.add("probe", at)
	l.contact, l.latency = contact, latency
	return nil
}

// started makes a VM whose envd is ready the one that serves. Owner only.
func (s *Sandbox) started(l *live, plan startPlan, times phases) error {
	begun := now()
	envd := l.ready()
	err := s.move(transition{to: Running, reason: "ready", phases: times, envd: &envd, change: func(r *store.Sandbox) {
		r.StartedAt, r.EndAt = begun, begun.Add(s.wanted())
		if plan.from == Stopped || plan.from == Failed {
			r.Layers = append(slices.Clone(plan.frozen), plan.top) // the layers of the run that ended are dropped
		}
		r.EnvdVersion = envd.Version
	}})
	if err != nil {
		return err
	}
	s.op = nil
	s.serve(l)
	s.armDeadline()
	s.settleWaiters(nil)
	s.tidy()
	return nil
}

// startFailed ends a start that has been undone. Owner only.
func (s *Sandbox) startFailed(op *operation, plan startPlan, cause error) {
	if s.op != op {
		return
	}
	s.op, s.vm = nil, nil
	if s.state() == Stopping {
		return // the kill answers the waiters
	}
	failure := s.startError(cause)
	if s.state() == Creating {
		s.settleWaiters(failure)
		s.settle(transition{to: Stopping, reason: "create failed: " + cause.Error()})
		s.end()
		return
	}
	to := plan.from
	if failure.Code == apierr.SandboxBroken {
		to = Failed
	}
	s.settle(transition{to: to, reason: "resume failed: " + cause.Error(), change: func(r *store.Sandbox) {
		r.Layers = slices.DeleteFunc(r.Layers, func(l string) bool { return l == plan.top })
		r.Proc = store.Proc{}
	}})
	s.settleWaiters(failure)
}

// startError is what the callers of a start that failed are told. It names the half that failed. Owner only.
func (s *Sandbox) startError(cause error) *apierr.Error {
	var known *apierr.Error
	switch {
	case errors.Is(cause, errDraining):
		return errDraining.For(s.id)
	case errors.Is(cause, snapcache.ErrCorrupt), errors.Is(cause, snapcache.ErrNotExist), errors.Is(cause, snapcache.ErrVersion):
		return s.fail(apierr.SandboxBroken, "%w", cause)
	case errors.As(cause, &known) && known.Code != apierr.Internal:
		return s.fail(known.Code, "%w", cause)
	case s.envd.State == Starting:
		return s.fail(apierr.NotReady, "the VM runs but envd is not ready: %w", cause)
	default:
		return s.fail(apierr.NotReady, "the VM did not start: %w", cause)
	}
}
