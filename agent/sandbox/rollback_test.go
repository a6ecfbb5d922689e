package sandbox

import (
	"context"
	"errors"
	"os"
	"slices"
	"testing"
	"time"

	"torpor/agent/snapcache"
	"torpor/api/apierr"
)

func (r *rig) rollback(s *Sandbox, snapshotID string) View {
	r.t.Helper()
	v, err := r.m.Rollback(r.ctx(), s.id, snapshotID)
	if err != nil {
		r.t.Fatal(err)
	}
	return v
}

func TestRollbackOfARunningSandbox(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	r.w.setMemory("i1", "first")
	r.keep(s, "s1")
	r.w.setMemory("i1", "second")
	r.keep(s, "s2")
	r.w.setMemory("i1", "third")
	before := s.View()

	v := r.rollback(s, "s1")
	if !v.Usable() || v.Incarnation <= before.Incarnation || v.EndAt.Sub(before.EndAt).Abs() > 2*time.Second {
		t.Errorf("%+v, before %+v", v, before)
	}
	r.wantMemory("i1", "first")
	if !r.hasEvent("i1", Paused, "rolled back to snapshot s1") {
		t.Error("no event tells of it")
	}
	// Forward again, and through a sleep.
	r.rollback(s, "s2")
	r.wantMemory("i1", "second")
	r.w.setMemory("i1", "fourth")
	r.pause(s)
	r.resume(s)
	r.wantMemory("i1", "fourth")
}

// The state before a rollback stays on the disk until the one after has run.
func TestRollbackOfAPausedSandbox(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	r.w.setMemory("i1", "first")
	r.keep(s, "s1")
	r.w.setMemory("i1", "second")
	r.pause(s)
	starts := r.w.count("start")
	v := r.rollback(s, "s1")
	if v.VM() != Paused || v.Generation != 2 || r.w.count("start") != starts {
		t.Errorf("%+v", v)
	}
	before, err := snapcache.Load(s.paths.generation(1))
	if err != nil {
		t.Fatalf("the state before is gone: %v", err)
	}
	for _, l := range before.Manifest.Layers {
		if _, err := os.Stat(s.paths.layer(l)); err != nil {
			t.Errorf("the disk before is gone: %v", err)
		}
	}
	if slices.ContainsFunc(v.Layers, func(l string) bool { return slices.Contains(before.Manifest.Layers, l) }) {
		t.Errorf("%v and %v share names", v.Layers, before.Manifest.Layers)
	}
	r.restart(nil)
	s = r.get("i1")
	r.resume(s)
	r.wantMemory("i1", "first")
	r.tidied(s)
	if got := s.generations(); !slices.Equal(got, []uint64{2}) {
		t.Errorf("generations left: %v", got)
	}
}

// A snapshot is the way out for a sandbox whose run ended or whose files are damaged.
func TestRollbackOfWhatDoesNotRunAnyMore(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	r.w.setMemory("i1", "first")
	r.keep(s, "s1")
	r.w.die("i1")
	r.until(s, "stopped", func(v View) bool { return v.VM() == Stopped })
	if v := r.rollback(s, "s1"); v.VM() != Paused {
		t.Errorf("it is %s", v.State)
	}
	r.resume(s)
	r.wantMemory("i1", "first")

	r.pause(s)
	r.untilTidied(s)
	for _, n := range s.generations() {
		if err := os.Remove(s.paths.generation(n) + "/" + stateFile); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := s.Resume(r.ctx(), 0); !isCode(err, apierr.SandboxBroken) {
		t.Fatalf("resume of a damaged one: %v", err)
	}
	r.rollback(s, "s1")
	r.resume(s)
	r.wantMemory("i1", "first")
}

func TestRollbackIsRefused(t *testing.T) {
	r := newRig(t)
	s, other := r.create("i1"), r.create("i2")
	r.keep(other, "s2")
	for _, id := range []string{"nosuch", "s2"} {
		_, err := r.m.Rollback(r.ctx(), s.id, id)
		wantCode(t, err, apierr.NotFound)
	}
	_, err := r.m.Rollback(r.ctx(), "nobody", "s2")
	wantCode(t, err, apierr.NotFound)
	if v := s.View(); !v.Usable() || v.Incarnation != 1 {
		t.Errorf("it was disturbed: %+v", v)
	}
}

// A rollback whose pause fails changes nothing.
func TestRollbackWhosePauseFails(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	r.w.setMemory("i1", "first")
	r.keep(s, "s1")
	r.w.setMemory("i1", "second")
	r.w.setHook(func(_ context.Context, op, _ string) error {
		if op == "save" {
			return errors.New("no")
		}
		return nil
	})
	_, err := r.m.Rollback(r.ctx(), "i1", "s1")
	wantCode(t, err, apierr.NotReady)
	r.wantMemory("i1", "second")
	r.w.setHook(nil)
	r.rollback(s, "s1") // nothing of the first is in the way
	r.wantMemory("i1", "first")
}

// A kill ends a rollback at whatever point it is; whoever waits is told.
func TestAKillDuringARollback(t *testing.T) {
	for _, at := range []string{"save", "stop", "restore"} {
		t.Run(at, func(t *testing.T) {
			r := newRig(t)
			s := r.create("i1")
			r.keep(s, "s1")
			arrived, release := r.holdAt(at)
			back := make(chan error, 1)
			go func() { _, err := r.m.Rollback(r.ctx(), "i1", "s1"); back <- err }()
			<-arrived
			killed := make(chan error, 1)
			go func() { killed <- r.m.Kill(r.ctx(), "i1") }()
			r.until(s, "stopping", func(v View) bool { return v.VM() == Stopping })
			release()
			if err := <-killed; err != nil {
				t.Fatal(err)
			}
			if err := <-back; err == nil {
				t.Error("the rollback is said to have succeeded")
			}
			r.gone("i1")
		})
	}
}

// What waits for a sandbox that is being rolled back is served by the state after it.
func TestARequestDuringARollback(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	r.w.setMemory("i1", "first")
	r.keep(s, "s1")
	r.w.setMemory("i1", "second")
	arrived, release := r.holdAt("save")
	back := make(chan error, 1)
	go func() { _, err := r.m.Rollback(r.ctx(), "i1", "s1"); back <- err }()
	<-arrived
	served := make(chan error, 1)
	go func() {
		lease, err := r.m.Acquire(r.ctx(), "i1", allow)
		if err == nil {
			if got := r.w.memory("i1"); got != "first" {
				err = errors.New("served by " + got)
			}
			lease.Release()
		}
		served <- err
	}()
	r.owner(s, "waited for", func() bool { return len(s.waiters) > 0 })
	_, err := r.m.Rollback(r.ctx(), "i1", "s1")
	wantCode(t, err, apierr.InTransition)
	release()
	if err := errors.Join(<-back, <-served); err != nil {
		t.Fatal(err)
	}
	if r.w.count("start") != 2 {
		t.Errorf("%d starts for one wake", r.w.count("start")-1)
	}
}

// A rollback ends a VM that is kept frozen, and one whose pause would have kept it.
func TestRollbackWhereVMsAreFrozen(t *testing.T) {
	r := newRig(t)
	r.freezes()
	s := r.create("i1")
	r.w.setMemory("i1", "first")
	r.keep(s, "s1")
	r.w.setMemory("i1", "second")
	if v := r.rollback(s, "s1"); !v.Usable() {
		t.Errorf("it is %s", v.State)
	}
	r.wantMemory("i1", "first")
	r.w.setMemory("i1", "third")
	r.pause(s)
	if v := r.rollback(s, "s1"); v.VM() != Paused || v.Tier != TierDisk {
		t.Errorf("it is %s, %s", v.State, v.Tier)
	}
	r.resume(s)
	r.wantMemory("i1", "first")
}
