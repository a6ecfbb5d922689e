package sandbox

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"torpor/agent/durable"
	"torpor/agent/powercut"
	"torpor/agent/timing"
	"torpor/api/apierr"
)

// sequence is something that is cut at every step.
type sequence struct {
	name     string
	frozen   bool // VMs of paused sandboxes are kept
	prepare  func(r *rig, s *Sandbox)
	do       func(r *rig, s *Sandbox) error
	least    int  // steps it has, those that were found when this was written
	asleep   bool // it is paused when do has succeeded
	cold     bool // its memory may be that of a boot
	vanishes bool // it is gone when do has succeeded
}

func pauseIt(r *rig, s *Sandbox) error { _, err := s.Pause(r.ctx()); return err }

func resumeIt(r *rig, s *Sandbox) error { _, _, err := s.Resume(r.ctx(), 0); return err }

// cycle has the sandbox sleep on disk and wake, n times.
func (r *rig) cycle(s *Sandbox, n int) {
	r.t.Helper()
	for range n {
		r.pause(s)
		s.Demote("test")
		r.resume(s)
		r.untilTidied(s)
	}
}

var sequences = []sequence{
	{name: "pause", prepare: func(*rig, *Sandbox) {}, do: pauseIt, least: 18, asleep: true},
	{name: "second pause", prepare: func(r *rig, s *Sandbox) { r.cycle(s, 1) }, do: pauseIt, least: 18, asleep: true},
	{name: "freeze", frozen: true, prepare: func(r *rig, s *Sandbox) { r.cycle(s, 1) }, do: pauseIt, least: 18, asleep: true},
	{name: "resume", prepare: func(r *rig, s *Sandbox) { r.cycle(s, 1); r.pause(s) }, do: resumeIt, least: 16},
	{name: "thaw", frozen: true, prepare: func(r *rig, s *Sandbox) { r.cycle(s, 1); r.pause(s) }, do: resumeIt, least: 9},
	{name: "resume and merge", prepare: func(r *rig, s *Sandbox) { r.cycle(s, maxChain); r.pause(s) }, do: resumeIt, least: 18},
	{name: "demote", frozen: true, prepare: func(r *rig, s *Sandbox) { r.pause(s) }, do: func(_ *rig, s *Sandbox) error {
		if !s.Demote("test") {
			return errors.New("it was not frozen")
		}
		return nil
	}, least: 5, asleep: true},
	{name: "cold boot", cold: true, prepare: func(r *rig, s *Sandbox) { r.pause(s) }, do: func(r *rig, s *Sandbox) error {
		_, _, err := s.Wake(r.ctx(), WakeRequest{Cold: true})
		return err
	}, least: 13},
	{name: "kill", frozen: true, vanishes: true, prepare: func(r *rig, s *Sandbox) { r.cycle(s, 1); r.pause(s) }, do: func(r *rig, s *Sandbox) error {
		ctx, cancel := context.WithTimeout(r.ctx(), 500*time.Millisecond) // a dead agent never answers
		defer cancel()
		return s.Kill(ctx, "test")
	}, least: 4},
}

// crashes are what ends at a step.
var crashes = []struct {
	name              string
	agent, vmm, power bool
}{
	{name: "agent", agent: true},
	{name: "vmm", vmm: true},
	{name: "both", agent: true, vmm: true},
	{name: "power", agent: true, vmm: true, power: true},
}

// Whatever ends at whatever step of whatever the sandbox does: the old or the new generation is there, whole; there are never two
// VMMs; the sandbox is not stuck, wakes, sleeps again and can be removed; and nothing is left of it.
func TestCrashAtEveryStep(t *testing.T) {
	if _, err := os.Stat("/dev/shm"); err == nil {
		t.Setenv("TMPDIR", "/dev/shm") // what is synced is said by the model, and need not reach a disk
	}
	all := 0
	for _, seq := range sequences {
		t.Run(seq.name, func(t *testing.T) {
			points := cutAt(t, seq, 0, crashes[0].agent, false, false)
			t.Logf("%d cut points: %s", len(points), strings.Join(points, " | "))
			all += len(points)
			if len(points) < seq.least {
				t.Errorf("there were %d", seq.least)
			}
			for _, c := range crashes {
				t.Run(c.name, func(t *testing.T) {
					for n, point := range points {
						if !t.Run(point, func(t *testing.T) { cutAt(t, seq, n+1, c.agent, c.vmm, c.power) }) {
							return
						}
					}
				})
			}
		})
	}
	t.Logf("%d cut points, each with %d kinds of crash", all, len(crashes))
}

// cutAt does the sequence, lets something end at step n, and looks at what comes of it. n is 0 for nothing; the steps are returned.
func cutAt(t *testing.T, seq sequence, n int, agent, vmm, power bool) []string {
	r := newRig(t, func(b *timing.Budgets) { b.ProbeEvery = time.Hour }) // what it probes by itself is no step
	c := &crasher{ended: make(chan struct{})}
	r.w.made = func(string) {}
	fs := powercut.New(t.TempDir(), c.before)
	if seq.frozen {
		r.cfg.FrozenFor = time.Hour
	}
	r.m.Close()
	r.cfg.Store.Watch(c.before)
	r.on(fs)
	r.w.made = fs.Made
	s := r.create("i1")
	r.w.setMemory("i1", "old")
	r.pause(s)
	s.Demote("test")
	r.resume(s)
	seq.prepare(r, s)
	r.untilTidied(s)
	if r.w.proc("i1") != nil && !seq.frozen {
		r.w.setMemory("i1", "new")
	}
	if vmm && !agent {
		c.strike = func() { r.w.die("i1") }
	}
	r.w.setHook(func(_ context.Context, op, _ string) error { return c.before(op) })
	c.arm(n)
	did := make(chan error, 1)
	go func() { did <- seq.do(r, s) }()
	err := errCrash
	select {
	case err = <-did:
	case <-c.ended: // it may never answer
	}
	tidied := make(chan struct{})
	go func() { defer close(tidied); r.untilTidied(s) }()
	select {
	case <-tidied:
	case <-c.ended:
	}
	steps := slices.Clone(c.seen())
	if err == nil && n > 0 && agent && !c.crashed() {
		return steps // this time it took fewer steps: what runs beside it comes in any order
	}
	r.recover(seq, c, fs, n > 0 && agent, vmm && agent, power)
	r.check(seq, err == nil && (!vmm || agent))
	return steps
}

func (c *crasher) seen() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.points
}

// recover ends the agent and what ended with it, and starts another.
func (r *rig) recover(seq sequence, c *crasher, fs *powercut.FS, crashed, vmm, power bool) {
	if !crashed {
		c.disarm()
		return
	}
	r.m.Close()
	if vmm {
		r.w.die("i1")
	}
	if power {
		if err := fs.Cut(); err != nil {
			r.t.Fatal(err)
		}
	}
	r.w.setHook(nil)
	r.cfg.Store.Watch(nil)
	r.cfg.FS, r.w.made = durable.OS{}, func(string) {}
	r.cfg.Kept = r.shelf()
	r.open()
}

func (c *crasher) disarm() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.armed = false
}

// check looks at a sandbox after a crash.
func (r *rig) check(seq sequence, done bool) {
	r.t.Helper()
	s, err := r.m.Get("i1")
	if seq.vanishes && (done || isCode(err, apierr.NotFound)) {
		r.gone("i1")
		return
	}
	if err != nil {
		r.t.Fatal(err)
	}
	if v := s.View(); v.VM() == Stopping || !v.RemovedAt.IsZero() { // the new agent goes on with it
		<-s.gone
		r.gone("i1")
		return
	}
	v := r.until(s, "settled", func(v View) bool {
		return v.VM() == Paused || v.VM() == Stopped || v.Usable() && r.w.proc("i1") != nil // the end of a VM is noticed a little later
	})
	r.untilTidied(s)
	r.verifyAll("i1")
	if done && seq.asleep && v.VM() != Paused {
		r.t.Errorf("the pause was answered, and it is %s (%s)", v.State, v.Reason)
	}
	if v, _, err = s.Resume(r.ctx(), 0); err != nil {
		r.t.Fatalf("it does not wake: %v", err)
	}
	memory := r.w.memory("i1")
	switch {
	case memory == "old" && !(done && seq.asleep && !seq.frozen), memory == "new", memory == "booted" && seq.cold:
	default:
		r.t.Errorf("its memory is %q", memory)
	}
	r.pause(s)
	s.Demote("test")
	r.resume(s)
	r.untilTidied(s)
	if again := r.w.memory("i1"); again != memory {
		r.t.Errorf("its memory was %q and then %q", memory, again)
	}
	if l := r.kept("i1"); len(l) > 2*maxChain {
		r.t.Errorf("layers are left: %q", l)
	}
	if g := s.generations(); len(g) > 2 {
		r.t.Errorf("generations are left: %d", g)
	}
	if err := r.m.Kill(r.ctx(), "i1"); err != nil {
		r.t.Error(err)
	}
	r.gone("i1")
}
