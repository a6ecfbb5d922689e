package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
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
	frozen      *frozen             // the VM that is still there; nil if there is none
	sources     []source            // tried in order
	origin      *snapcache.Snapshot // what the generation of the only source is to be made from first; nil: it is there
	top         string
	diskBytes   uint64
	incarnation uint64
	handshake   *guestpb.HandshakeRequest
	queued      time.Time // when the first request for this start came
}

// beginCreate records the sandbox and starts it from a template, or from a snapshot, which becomes its first generation. Owner only.
func (s *Sandbox) beginCreate(from origin, queued time.Time) error {
	reason, below, generation := "created from template "+from.template.ID, []string{}, uint64(0)
	if from.snap != nil {
		reason = "created from a snapshot of sandbox " + from.snap.Manifest.Owner
		below, generation = layerNames(len(from.snap.Manifest.Layers), s.rec.NextLayer), s.rec.NextGen
	}
	err := s.move(transition{to: Creating, reason: reason, change: func(r *store.Sandbox) {
		r.Incarnation++
		r.NextLayer += uint64(len(below))
		r.Layers, r.NextLayer = append(slices.Clone(below), layerName(r.NextLayer)), r.NextLayer+1
		r.Generation, r.Proc = generation, store.Proc{}
		r.NextGen = generation + 1
	}})
	if err != nil {
		return err
	}
	plan := s.plan(queued)
	plan.template, plan.origin, plan.sources = from.template, from.snap, []source{{mode: ModeNone, generation: generation, layers: below}}
	s.begin(func(ctx context.Context, op *operation) { s.runStart(ctx, op, plan) })
	return nil
}

// beginResume starts the sandbox from what it slept with, or from its disk alone if the waiter asks for that. Owner only.
func (s *Sandbox) beginResume(w *waiter) error {
	if s.m.ctx.Err() != nil {
		return errDraining.For(s.id)
	}
	from, cold, asleep, reason := s.state(), w.cold, s.frozen, w.reason
	var sources []source
	switch {
	case cold:
		sources = []source{{mode: ModeCold, layers: slices.Clone(s.rec.Layers)}}
		reason += "; with its disk only, as asked"
	case s.rec.Generation == 0:
		return s.fail(apierr.SandboxBroken, "the sandbox is %s (%s) and has no snapshot to resume from; "+
			"resume it with memory:false to boot it anew on its disk, or kill it", s.rec.State, s.rec.Reason)
	default:
		sources = s.ladder()
	}
	if from != Paused && !cold {
		reason = fmt.Sprintf("%s; back to snapshot %d, since the run after it ended: %s", reason, s.rec.Generation, s.rec.Reason)
	}
	thaws := asleep != nil && !cold
	err := s.move(transition{to: Resuming, reason: reason, change: func(r *store.Sandbox) {
		r.Incarnation++
		if thaws {
			r.Layers = append(r.Layers, asleep.top)
			return
		}
		r.Layers = append(r.Layers, layerName(r.NextLayer))
		r.NextLayer++
		r.Proc = store.Proc{}
	}})
	if err != nil {
		return err
	}
	plan := s.plan(w.since)
	plan.from, plan.frozen, plan.sources = from, asleep, sources
	if asleep != nil {
		asleep.stop()
		s.frozen = nil
	}
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
	l, from, err := s.climb(ctx, op, &plan, times)
	times.add("total", plan.queued)
	if err == nil {
		if err = s.step(op, func() error { return s.started(l, plan, from, times) }); err == nil {
			return
		}
		l.contact.Close()
		err = errors.Join(err, s.tearDown(l.vm))
	}
	err = errors.Join(because(ctx, err), s.removeTop(plan.top))
	s.do(func() { s.startFailed(op, plan, err) })
}

// outcome is what a VM was brought up from, and why not from something better.
type outcome struct {
	source
	instead []string
}

// climb tries what the sandbox can start from, best first. It goes on to the next only when one is damaged: whatever else
// goes wrong may go right when it is tried again. On error there is no VM left.
func (s *Sandbox) climb(ctx context.Context, op *operation, plan *startPlan, times phases) (*live, outcome, error) {
	var to outcome
	l, err := s.wakeFrozen(ctx, op, plan, times)
	switch {
	case l != nil:
		to.source = source{mode: ModeFrozen, layers: plan.frozen.layers}
		return l, to, nil
	case err != nil && (ctx.Err() != nil || isKilled(err)):
		return nil, to, err
	case err != nil:
		to.instead = append(to.instead, "its frozen VM could not be woken: "+err.Error())
	}
	at := time.Now()
	t, err := s.templateOf(ctx, plan)
	if err != nil {
		return nil, to, err
	}
	times.add("template", at)
	if plan.origin != nil {
		if err := s.plantOrigin(plan); err != nil {
			return nil, to, err
		}
	}
	var failures []error
	for _, from := range plan.sources {
		l, err := s.bringUp(ctx, op, plan, t, &from, times)
		if err == nil {
			to.source = from
			return l, to, nil
		}
		failures = append(failures, err)
		if ctx.Err() != nil || !damaged(err) {
			break
		}
		s.log.Error().Err(err).Stringer("source", from).Msg("a start found its source damaged")
		to.instead = append(to.instead, err.Error())
	}
	return nil, to, errors.Join(failures...)
}

// plantOrigin makes the generation that a new sandbox starts from.
func (s *Sandbox) plantOrigin(plan *startPlan) error {
	snap, err := s.plant(plan.origin, plan.sources[0].generation, plan.sources[0].layers)
	if err != nil {
		return err
	}
	s.do(func() { s.snapshotBytes = snap.AllocatedBytes() })
	return nil
}

func isKilled(err error) bool { return errors.Is(err, errKilled) }

// because puts the reason an operation was cancelled for, if it was, before what that led to.
func because(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return fmt.Errorf("%w: %w", cause, err)
	}
	return err
}

// removeTop removes the layer a failed start made: nothing of use has been written to it.
func (s *Sandbox) removeTop(top string) error {
	if err := s.m.cfg.FS.Remove(s.paths.layer(top)); err != nil {
		return fmt.Errorf("remove the new disk layer: %w", err)
	}
	return nil
}

// bringUp does the work of a start from one source. On error the VM it started is gone.
func (s *Sandbox) bringUp(ctx context.Context, op *operation, plan *startPlan, t *template.Template, from *source, times phases) (_ *live, err error) {
	at := time.Now()
	start, err := s.prepare(t, plan, from)
	if err != nil {
		return nil, err
	}
	at = times.add("prepare", at)

	s.m.makeRoom(s.id, t.MemoryBytes)
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

	l := &live{vm: vm, guest: s.m.cfg.Guests(s.m.cfg.VMMs.VsockSocket(s.id)), incarnation: plan.incarnation, done: make(chan struct{})}
	if at, err = start(ctx, l, times, at); err != nil {
		return nil, err
	}
	err = s.step(op, func() error {
		s.setEnvd(s.envd.as(Starting), "the VM runs", nil)
		return nil
	})
	if err != nil {
		return nil, err
	}
	if err := s.greet(ctx, l, plan.handshake, times, at); err != nil {
		return nil, err
	}
	return l, nil
}

// starter makes the machine of a VMM and has it run.
type starter func(ctx context.Context, l *live, times phases, at time.Time) (time.Time, error)

// prepare makes the new top layer and names every file of the start.
func (s *Sandbox) prepare(t *template.Template, plan *startPlan, from *source) (starter, error) {
	top := s.paths.layer(plan.top)
	if from.mode == ModeCold {
		req, err := s.bootRequest(t, from, top)
		if err == nil {
			err = s.makeTop(plan.top, plan.diskBytes)
		}
		return func(ctx context.Context, l *live, times phases, at time.Time) (time.Time, error) {
			return s.boot(ctx, l, req, times, at)
		}, err
	}
	req, err := s.restoreRequest(t, from, top)
	if err == nil {
		err = s.makeTop(plan.top, plan.diskBytes)
	}
	return func(ctx context.Context, l *live, times phases, at time.Time) (time.Time, error) {
		if err := s.restore(ctx, l.vm, req); err != nil {
			return at, err
		}
		return times.add("restore", at), nil
	}, err
}

// makeTop makes an empty disk layer. What it is in becomes durable with it: what a guest syncs must be found again.
func (s *Sandbox) makeTop(name string, diskBytes uint64) error {
	files, top := s.m.cfg.FS, s.paths.layer(name)
	if _, err := os.Stat(s.paths.layers()); err != nil {
		err := errors.Join(files.Mkdir(s.paths.layers()), files.SyncDir(s.paths.dir), files.SyncDir(s.m.cfg.Dir))
		if err != nil {
			return fmt.Errorf("make the layer directory: %w", err)
		}
	}
	if err := files.Remove(top); err != nil { // left by a start of the same number that was cut short
		return fmt.Errorf("make the disk layer: %w", err)
	}
	if err := s.m.cfg.Layers.Create(top, diskBytes); err != nil {
		return fmt.Errorf("make the disk layer: %w", err)
	}
	return nil
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
func (s *Sandbox) started(l *live, plan startPlan, from outcome, times phases) error {
	begun := now()
	envd := l.ready()
	err := s.move(transition{to: Running, reason: from.ready(), phases: times, envd: &envd, change: func(r *store.Sandbox) {
		r.StartedAt, r.EndAt = begun, begun.Add(s.wanted())
		from.began(r, plan.top) // after a run that ended its layers are dropped here
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

// ready says what a start began from: nobody shall take a machine for another than it is.
func (o outcome) ready() string {
	reason := "ready"
	if o.mode != ModeNone {
		reason += "; resumed from: " + o.String()
	}
	if len(o.instead) > 0 {
		reason += ", since " + strings.Join(o.instead, "; and ")
	}
	return reason
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
	case errors.Is(cause, errTemplate):
		return s.fail(apierr.SandboxBroken, "%w", cause)
	case errors.Is(cause, snapcache.ErrCorrupt), errors.Is(cause, snapcache.ErrNotExist), errors.Is(cause, snapcache.ErrVersion):
		return s.fail(apierr.SandboxBroken, "%w; resume it with memory:false to boot it anew on its disk", cause)
	case errors.As(cause, &known) && known.Code == apierr.SandboxBroken:
		return s.fail(apierr.SandboxBroken, "%w; resume it with memory:false to boot it anew on its disk", cause)
	case errors.As(cause, &known) && known.Code != apierr.Internal:
		return s.fail(known.Code, "%w", cause)
	case s.envd.State == Starting:
		return s.fail(apierr.NotReady, "the VM runs but envd is not ready: %w", cause)
	default:
		return s.fail(apierr.NotReady, "the VM did not start: %w", cause)
	}
}
