package sandbox

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"torpor/agent/snapcache"
	"torpor/agent/store"
	"torpor/api/apierr"
)

// rewrite changes a record behind the back of the agents, to what a crash would have left.
func (r *rig) rewrite(id string, change func(*store.Sandbox)) {
	r.t.Helper()
	rec, err := r.cfg.Store.Sandbox(context.Background(), id)
	if err != nil {
		r.t.Fatal(err)
	}
	change(&rec)
	if err := r.cfg.Store.Put(context.Background(), rec); err != nil {
		r.t.Fatal(err)
	}
}

// setProcState changes what a guest does while no agent runs.
func (w *world) setProcState(name, state string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.procs[name].state = state
}

func TestRunningSandboxIsTakenOverAndProvesItselfAgain(t *testing.T) {
	r := newRig(t)
	r.create("i1")
	r.w.setMemory("i1", "nonce")
	before, handshakes := r.w.proc("i1"), r.w.proc("i1").handshakes
	r.restart(nil)
	s := r.get("i1")
	l, err := r.m.Acquire(r.ctx(), "i1", deny) // held until envd has answered
	if err != nil {
		t.Fatal(err)
	}
	l.Release()
	v := s.View()
	if !v.Usable() || v.Incarnation != 1 || r.w.proc("i1") != before || r.w.memory("i1") != "nonce" {
		t.Errorf("taken over as %+v", v)
	}
	if before.handshakes <= handshakes {
		t.Error("envd was believed without a new handshake")
	}
	if left := time.Until(v.EndAt); left < 50*time.Minute {
		t.Errorf("the deadline was lost: %v", left)
	}
	r.pause(s)
	r.resume(s)
}

func TestPausedSandboxStaysPausedAndKeepsEverything(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	r.w.setMemory("i1", "nonce")
	before := r.pause(s)
	r.restart(nil)
	s = r.get("i1")
	after := s.View()
	if after.VM() != Paused || after.SnapshotBytes != before.SnapshotBytes || !after.EndAt.Equal(before.EndAt) || !after.AutoResume || after.Timeout != time.Hour {
		t.Errorf("before %+v\nafter %+v", before, after)
	}
	r.resume(s)
	if r.w.memory("i1") != "nonce" {
		t.Error("the memory is lost")
	}
}

func TestWhatEndedWhileNoAgentRanIsReportedStopped(t *testing.T) {
	for name, between := range map[string]func(r *rig){
		"VMM died":     func(r *rig) { r.w.die("i1") },
		"guest ended":  func(r *rig) { r.w.powerOff("i1") },
		"host restart": func(r *rig) { r.w.die("i1"); r.rewrite("i1", func(s *store.Sandbox) { s.Proc.Boot = "another" }) },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			s := r.create("i1")
			r.pause(s)
			r.resume(s)
			r.restart(func() { between(r) })
			v := r.get("i1").View()
			if v.VM() != Stopped || v.Reason == "" {
				t.Fatalf("reported %s, %q", v.State, v.Reason)
			}
			if r.w.proc("i1") != nil {
				t.Error("a VMM without a guest was left")
			}
			v = r.resume(r.get("i1"))
			if v.Incarnation != 3 {
				t.Errorf("incarnation %d was used before", v.Incarnation)
			}
		})
	}
}

func TestInterruptedPauseIsResolvedToWhatIsTrue(t *testing.T) {
	t.Run("published", func(t *testing.T) {
		r := newRig(t)
		s := r.create("i1")
		r.w.setMemory("i1", "nonce")
		proc := r.w.proc("i1").id
		r.pause(s)
		s.do(func() {})
		r.restart(func() {
			// As if the agent had died between the rename and the record, with the VMM alive.
			r.rewrite("i1", func(rec *store.Sandbox) {
				rec.State, rec.Generation = string(Pausing), 0
				rec.Proc = store.Proc{PID: proc.PID, Start: proc.Start, Boot: proc.Boot}
			})
			if _, err := r.w.Start(context.Background(), "i1", ""); err != nil {
				t.Fatal(err)
			}
		})
		s = r.get("i1")
		if v := s.View(); v.VM() != Paused || v.Generation != 1 || r.w.proc("i1") != nil {
			t.Fatalf("resolved to %+v, process %v", v, r.w.proc("i1"))
		}
		r.resume(s)
		if r.w.memory("i1") != "nonce" {
			t.Error("the memory is lost")
		}
	})
	t.Run("not published", func(t *testing.T) {
		r := newRig(t)
		s := r.create("i1")
		r.w.setMemory("i1", "nonce")
		r.restart(func() {
			r.rewrite("i1", func(rec *store.Sandbox) { rec.State = string(Pausing) })
			r.w.setProcState("i1", "paused")
			if err := os.MkdirAll(s.paths.generation(1)+".tmp", 0o700); err != nil {
				t.Fatal(err)
			}
		})
		s = r.get("i1")
		r.until(s, "ready", View.Usable)
		if v := s.View(); v.Incarnation != 1 || r.w.memory("i1") != "nonce" || !r.hasEvent("i1", Running, interrupted) {
			t.Errorf("resolved to %+v", v)
		}
		if left, _ := filepath.Glob(filepath.Join(s.paths.dir, "*.tmp")); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	})
	t.Run("dead", func(t *testing.T) {
		r := newRig(t)
		r.create("i1")
		r.restart(func() {
			r.rewrite("i1", func(rec *store.Sandbox) { rec.State = string(Pausing) })
			r.w.die("i1")
		})
		if v := r.get("i1").View(); v.VM() != Stopped {
			t.Errorf("resolved to %s", v.State)
		}
	})
}

func TestInterruptedResumeGoesBackToTheSnapshot(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	r.w.setMemory("i1", "nonce")
	r.pause(s)
	r.restart(func() {
		vm, err := r.w.Start(context.Background(), "i1", "")
		if err != nil {
			t.Fatal(err)
		}
		id := vm.Identity()
		r.rewrite("i1", func(rec *store.Sandbox) {
			rec.State, rec.Incarnation = string(Resuming), 2
			rec.Layers, rec.NextLayer = append(rec.Layers, "2.layer"), 3
			rec.Proc = store.Proc{PID: id.PID, Start: id.Start, Boot: id.Boot}
		})
	})
	s = r.get("i1")
	if v := s.View(); v.VM() != Paused || r.w.proc("i1") != nil || len(v.Layers) != 1 {
		t.Fatalf("resolved to %+v", v)
	}
	if v := r.resume(s); v.Incarnation != 3 || r.w.memory("i1") != "nonce" {
		t.Errorf("resumed as %+v", v)
	}
}

func TestInterruptedCreateAndKillEnd(t *testing.T) {
	for _, state := range []VMState{Creating, Stopping} {
		r := newRig(t)
		r.create("i1")
		r.restart(func() { r.rewrite("i1", func(rec *store.Sandbox) { rec.State = string(state) }) })
		if err := r.m.Kill(r.ctx(), "i1"); err != nil {
			t.Error(err)
		}
		r.gone("i1")
	}
}

func TestOnlyWhatIsOwnerlessIsRemoved(t *testing.T) {
	r := newRig(t)
	r.create("i1")
	stranger := filepath.Join(r.cfg.Dir, "istranger")
	r.restart(func() {
		if _, err := r.w.Start(context.Background(), "iorphan", ""); err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(stranger, 0o700); err != nil {
			t.Fatal(err)
		}
	})
	if r.w.proc("iorphan") != nil {
		t.Error("a VMM without a record lives on")
	}
	if r.w.proc("i1") == nil {
		t.Error("a VMM with a record was ended")
	}
	if _, err := os.Stat(stranger); err != nil {
		t.Error("the data of a sandbox without a record was removed")
	}
}

func TestLostSnapshotIsReportedFailed(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	r.pause(s)
	r.restart(func() {
		if err := snapcache.Remove(s.paths.generation(1)); err != nil {
			t.Fatal(err)
		}
	})
	s = r.get("i1")
	if v := s.View(); v.VM() != Failed || !strings.Contains(v.Reason, "no such snapshot") {
		t.Errorf("reported %s, %q", v.State, v.Reason)
	}
	_, _, err := s.Resume(r.ctx(), 0)
	wantCode(t, err, apierr.SandboxBroken)
}

func TestStoppingTheAgentUndoesWhatIsUnderWay(t *testing.T) {
	r := newRig(t)
	pausing, resuming := r.create("i1"), r.create("i2")
	r.w.setMemory("i1", "nonce")
	r.pause(resuming)
	r.w.setHook(func(ctx context.Context, op, name string) error {
		if (name == "i1" && op == "save") || (name == "i2" && op == "restore") {
			<-ctx.Done()
			return ctx.Err()
		}
		return nil
	})
	paused, resumed := make(chan error, 1), make(chan error, 1)
	go func() { _, err := pausing.Pause(r.ctx()); paused <- err }()
	go func() { _, _, err := resuming.Resume(r.ctx(), 0); resumed <- err }()
	for r.w.count("save") < 2 || r.w.count("restore") < 3 {
		pausing.do(func() {})
	}
	r.restart(func() { r.w.setHook(nil) })
	for name, err := range map[string]error{"pause": <-paused, "resume": <-resumed} {
		if !isCode(err, apierr.Draining) {
			t.Errorf("%s: %v", name, err)
		}
	}
	r.until(r.get("i1"), "ready", View.Usable)
	if r.w.memory("i1") != "nonce" {
		t.Error("the memory of the one that was pausing is lost")
	}
	if v := r.get("i2").View(); v.VM() != Paused || r.w.proc("i2") != nil {
		t.Errorf("the one that was resuming is %s", v.State)
	}
}

func TestAStoreThatCannotBeWrittenStopsATransitionBeforeItBegins(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	r.cfg.Store.Close()
	pauses := r.w.count("pause")
	if _, err := s.Pause(r.ctx()); err == nil {
		t.Error("a pause without a record")
	}
	if v := s.View(); v.VM() != Running || r.w.count("pause") != pauses {
		t.Errorf("it went on to %s", v.State)
	}
	if _, err := r.m.Create(r.ctx(), request("i2")); err == nil || r.w.proc("i2") != nil {
		t.Error("a create without a record")
	}
}
