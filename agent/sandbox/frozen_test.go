package sandbox

import (
	"errors"
	"os"
	"testing"
	"time"
)

func TestFrozenSandboxWakesInPlace(t *testing.T) {
	r := newRig(t)
	r.freezes()
	s := r.create("i1")
	r.w.setMemory("i1", "in memory")
	before := r.w.proc("i1")
	lease := r.acquire(s)
	paused := r.pause(s)
	if paused.VM() != Paused || paused.Tier != TierFrozen || paused.Envd.State != Absent || paused.Usable() {
		t.Fatalf("%+v", paused)
	}
	select {
	case <-lease.Done():
	default:
		t.Error("a request outlived the pause")
	}
	lease.Release()
	r.verifyAll("i1")
	v := r.resume(s)
	if r.w.proc("i1") != before || r.w.count("restore") != 1 {
		t.Error("it was not the same VM")
	}
	if v.ResumeMode != ModeFrozen || v.Tier != TierLive || v.Incarnation != 2 || !r.hasEvent("i1", Running, "resumed from: frozen") {
		t.Errorf("%+v", v)
	}
	r.remembers("i1", 1, 2)
}

func (r *rig) acquire(s *Sandbox) *lease {
	r.t.Helper()
	l, err := s.acquire(r.ctx(), allow)
	if err != nil {
		r.t.Fatal(err)
	}
	return l
}

// Whatever ends a frozen VM, the sandbox is where it was, on disk.
func TestFrozenVMThatEnds(t *testing.T) {
	for name, end := range map[string]func(r *rig, s *Sandbox){
		"by itself":        func(r *rig, _ *Sandbox) { r.w.die("i1") },
		"demoted":          func(_ *rig, s *Sandbox) { s.Demote("test") },
		"short of memory":  func(r *rig, _ *Sandbox) { r.memory.short <- struct{}{} },
		"agent ends":       func(r *rig, _ *Sandbox) { r.restart(nil) },
		"for another's":    func(r *rig, _ *Sandbox) { r.memory.set(0); r.create("i2") },
		"both, agent last": func(r *rig, _ *Sandbox) { r.w.die("i1"); r.restart(nil) },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.freezes()
			s := r.create("i1")
			r.w.setMemory("i1", "kept")
			r.pause(s)
			end(r, s)
			s = r.get("i1")
			v := r.until(s, "on disk", func(v View) bool { return v.Tier == TierDisk })
			if v.VM() != Paused {
				t.Errorf("it is %s", v.State)
			}
			if !r.hasTierEvent("i1") {
				t.Error("no event says so")
			}
			if v := r.resume(s); v.ResumeMode != ModeMemory || r.w.memory("i1") != "kept" {
				t.Errorf("resumed from %s with %q", v.ResumeMode, r.w.memory("i1"))
			}
			r.remembers("i1", 1, 2)
		})
	}
}

func (r *rig) hasTierEvent(id string) bool {
	events, err := r.m.Events(r.ctx(), id, 0, 1000)
	if err != nil {
		r.t.Fatal(err)
	}
	for _, e := range events {
		if e.Type == "tier" && e.From == TierFrozen && e.To == TierDisk && e.Reason != "" {
			return true
		}
	}
	return false
}

func TestFrozenByAge(t *testing.T) {
	r := newRig(t)
	r.restart(func() { r.cfg.FrozenFor = time.Millisecond })
	s := r.create("i1")
	r.pause(s)
	r.until(s, "on disk", func(v View) bool { return v.VM() == Paused && v.Tier == TierDisk })
	r.resume(s)
}

func TestFrozenVMThatCannotBeWoken(t *testing.T) {
	for _, op := range []string{"resume", "handshake", "probe"} {
		t.Run(op, func(t *testing.T) {
			r := newRig(t)
			r.freezes()
			s := r.create("i1")
			r.w.setMemory("i1", "kept")
			r.pause(s)
			r.w.failOnce(op, errors.New("boom"))
			v := r.resume(s)
			if v.ResumeMode != ModeMemory || r.w.memory("i1") != "kept" || !r.hasEvent("i1", Running, "boom") {
				t.Errorf("resumed from %s with %q", v.ResumeMode, r.w.memory("i1"))
			}
			r.remembers("i1", 1, 2)
			r.untilTidied(s)
			if l := r.kept("i1"); len(l) != len(s.View().Layers) {
				t.Errorf("layers %q, of which %q are used", l, s.View().Layers)
			}
		})
	}
}

func TestFrozenSandboxIsKilled(t *testing.T) {
	r := newRig(t)
	r.freezes()
	s := r.create("i1")
	r.pause(s)
	if err := s.Kill(r.ctx(), "test"); err != nil {
		t.Fatal(err)
	}
	r.gone("i1")
}

// A VM is not frozen for ever: its disk would get a layer each time.
func TestFrozenVMIsEndedAfterManyPauses(t *testing.T) {
	r := newRig(t)
	r.freezes()
	s := r.create("i1")
	for range maxTops {
		if v := r.pause(s); v.Tier != TierFrozen {
			t.Fatalf("tier %s", v.Tier)
		}
		r.resume(s)
	}
	if v := r.pause(s); v.Tier != TierDisk {
		t.Fatalf("tier %s", v.Tier)
	}
	if v := r.resume(s); v.ResumeMode != ModeMemory {
		t.Errorf("resumed from %s", v.ResumeMode)
	}
}

// A save that fails, before or after the disk has its new top, leaves a sandbox that runs, pauses and wakes.
func TestSaveThatFailsAroundTheNewTop(t *testing.T) {
	for _, op := range []string{"create layer", "pause", "save", "saved"} {
		t.Run(op, func(t *testing.T) {
			r := newRig(t)
			r.freezes()
			s := r.create("i1")
			r.w.failOnce(op, errors.New("boom"))
			if _, err := s.Pause(r.ctx()); err == nil {
				t.Fatal("it succeeded")
			}
			v := s.View()
			if !v.Usable() {
				t.Fatalf("it is %s", v.State)
			}
			for _, l := range v.Layers {
				if _, err := os.Stat(s.paths.layer(l)); err != nil {
					t.Error(err)
				}
			}
			r.pause(s)
			r.resume(s)
			s.Demote("test")
			r.pause(s)
			s.Demote("test")
			r.resume(s)
			r.remembers("i1", 1, 2, 3)
		})
	}
}
