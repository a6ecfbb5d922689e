package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"torpor/agent/kept"
	"torpor/api/apierr"
)

func (r *rig) keep(s *Sandbox, snapshotID string) kept.Info {
	r.t.Helper()
	info, err := r.m.KeepSnapshot(r.ctx(), s.id, snapshotID)
	if err != nil {
		r.t.Fatal(err)
	}
	return info
}

// from makes a sandbox from a kept snapshot.
func (r *rig) from(snapshotID, id string) *Sandbox {
	r.t.Helper()
	return r.create(id, func(c *CreateRequest) { c.TemplateID, c.SnapshotID = "", snapshotID })
}

func (r *rig) wantMemory(id, want string) {
	r.t.Helper()
	if got := r.w.memory(id); got != want {
		r.t.Errorf("%s has the memory %q, want %q", id, got, want)
	}
}

func (r *rig) snapshotIDs() []string {
	ids := []string{}
	for _, i := range r.m.Snapshots() {
		ids = append(ids, i.ID)
	}
	return ids
}

// onShelf checks that the shelf has no directory but those of the ids.
func (r *rig) onShelf(want ...string) {
	r.t.Helper()
	entries, err := os.ReadDir(filepath.Join(r.dir, "snapshots"))
	if err != nil {
		r.t.Fatal(err)
	}
	got := []string{}
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if !slices.Equal(got, append([]string{}, want...)) {
		r.t.Errorf("on the shelf: %v, want %v", got, want)
	}
}

// owner waits until the owner of a sandbox finds something to be so.
func (r *rig) owner(s *Sandbox, what string, so func() bool) {
	r.t.Helper()
	ctx := r.ctx()
	every := time.NewTicker(time.Millisecond)
	defer every.Stop()
	for {
		found := false
		if s.do(func() { found = so() }); found {
			return
		}
		select {
		case <-every.C:
		case <-ctx.Done():
			r.t.Fatalf("never %s", what)
		}
	}
}

// tidied waits until old files have been cleared up.
func (r *rig) tidied(s *Sandbox) {
	r.t.Helper()
	var tidying *task
	r.owner(s, "tidying", func() bool { tidying = s.tidying; return tidying != nil })
	<-tidying.done
}

// holdAt makes the next operation of a name wait; arrived is closed when it has come, and it goes on with release.
func (r *rig) holdAt(op string) (arrived chan struct{}, release func()) {
	arrived = make(chan struct{})
	gate := make(chan struct{})
	var once sync.Once
	r.w.setHook(func(ctx context.Context, got, _ string) error {
		if got != op {
			return nil
		}
		first := false
		once.Do(func() { first = true; close(arrived) })
		if !first {
			return nil
		}
		select {
		case <-gate:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	return arrived, sync.OnceFunc(func() { close(gate) })
}

func TestASnapshotOfARunningSandboxDoesNotDisturbIt(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	r.w.setMemory("i1", "then")
	lease, err := r.m.Acquire(r.ctx(), "i1", allow)
	if err != nil {
		t.Fatal(err)
	}
	before := s.View()
	info := r.keep(s, "s1")
	if info.Manifest.Owner != "i1" || info.Manifest.Template != "base" || info.SizeBytes == 0 {
		t.Errorf("%+v", info)
	}
	after := s.View()
	if !after.Usable() || after.Incarnation != before.Incarnation || after.Since != before.Since || r.w.count("pause") != 0 {
		t.Errorf("it was disturbed: %+v, before %+v", after, before)
	}
	select {
	case <-lease.Done():
		t.Error("a request in flight was cut")
	default:
	}
	lease.Release()
	if again := r.keep(s, "s1"); again.Manifest.CreatedAt != info.Manifest.CreatedAt || r.w.count("checkpoint") != 1 {
		t.Error("repeating it made another one")
	}

	// What comes after is the sandbox's own, also on its disk.
	r.w.setMemory("i1", "later")
	child := r.from("s1", "i2")
	r.wantMemory("i2", "then")
	if v := child.View(); v.Incarnation <= before.Incarnation || v.TemplateID != "base" || v.Generation != 1 {
		t.Errorf("the child is %+v", v)
	}
	r.pause(s)
	r.resume(s)
	r.wantMemory("i1", "later")
	// Each can end; the others live on, through sleeps too.
	if err := r.m.Kill(r.ctx(), "i1"); err != nil {
		t.Fatal(err)
	}
	r.gone("i1")
	r.w.setMemory("i2", "child")
	r.pause(child)
	r.from("s1", "i3")
	r.wantMemory("i3", "then")
	if err := r.m.DeleteSnapshot("s1"); err != nil {
		t.Fatal(err)
	}
	wantCode(t, r.m.DeleteSnapshot("s1"), apierr.NotFound)
	r.resume(child)
	r.wantMemory("i2", "child")
	r.onShelf()
	_, err = r.m.Create(r.ctx(), CreateRequest{ID: "i4", SnapshotID: "s1", Timeout: time.Hour})
	wantCode(t, err, apierr.NotFound)
}

func TestASnapshotOfAPausedSandboxDoesNotWakeIt(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	r.w.setMemory("i1", "asleep")
	r.pause(s)
	starts := r.w.count("start")
	r.keep(s, "s1")
	if s.View().VM() != Paused || r.w.count("start") != starts || r.w.count("checkpoint") != 0 {
		t.Error("it was woken")
	}
	r.resume(s)
	r.w.setMemory("i1", "awake")
	r.from("s1", "i2")
	r.wantMemory("i2", "asleep")
}

// A snapshot waits for what is under way, whatever that is.
func TestASnapshotDuringAPause(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	r.w.setMemory("i1", "m")
	arrived, release := r.holdAt("save")
	paused := make(chan error, 1)
	go func() { _, err := s.Pause(r.ctx()); paused <- err }()
	<-arrived
	kept := make(chan error, 1)
	go func() { _, err := r.m.KeepSnapshot(r.ctx(), "i1", "s1"); kept <- err }()
	select {
	case err := <-kept:
		t.Fatalf("it did not wait: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	release()
	if err := errors.Join(<-paused, <-kept); err != nil {
		t.Fatal(err)
	}
	r.from("s1", "i2")
	r.wantMemory("i2", "m")
}

// A pause waits for a snapshot, and the sandbox serves until then.
func TestAPauseDuringASnapshot(t *testing.T) {
	for _, by := range []string{"request", "deadline"} {
		t.Run(by, func(t *testing.T) {
			r := newRig(t)
			s := r.create("i1")
			arrived, release := r.holdAt("checkpoint")
			kept := make(chan error, 1)
			go func() { _, err := r.m.KeepSnapshot(r.ctx(), "i1", "s1"); kept <- err }()
			<-arrived
			paused := make(chan error, 1)
			if by == "request" {
				go func() { _, err := s.Pause(r.ctx()); paused <- err }()
				r.owner(s, "waiting for the pause", func() bool { return len(s.pausers) > 0 })
			} else if _, err := s.SetDeadline(time.Now().Add(-time.Second), false); err != nil {
				t.Fatal(err)
			}
			if !s.View().Usable() {
				t.Error("it does not serve while it is being saved")
			}
			release()
			if err := <-kept; err != nil {
				t.Fatal(err)
			}
			if by == "request" {
				if err := <-paused; err != nil {
					t.Fatal(err)
				}
			}
			r.until(s, "paused", func(v View) bool { return v.VM() == Paused })
			r.resume(s)
		})
	}
}

// A deadline that was moved away while a snapshot held the pause up does not pause any more.
func TestADeadlineThatIsMovedDuringASnapshot(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	arrived, release := r.holdAt("checkpoint")
	kept := make(chan error, 1)
	go func() { _, err := r.m.KeepSnapshot(r.ctx(), "i1", "s1"); kept <- err }()
	<-arrived
	if _, err := s.SetDeadline(time.Now().Add(-time.Second), false); err != nil {
		t.Fatal(err)
	}
	if _, err := s.SetDeadline(time.Now().Add(time.Hour), false); err != nil {
		t.Fatal(err)
	}
	release()
	if err := <-kept; err != nil {
		t.Fatal(err)
	}
	if v := s.View(); !v.Usable() || r.w.count("pause") != 0 {
		t.Errorf("it is %s", v.State)
	}
}

func TestAKillDuringASnapshot(t *testing.T) {
	r := newRig(t)
	r.create("i1")
	arrived, _ := r.holdAt("checkpoint")
	ctx, cancel := context.WithCancel(r.ctx())
	kept := make(chan error, 1)
	go func() { _, err := r.m.KeepSnapshot(ctx, "i1", "s1"); kept <- err }()
	<-arrived
	killed := make(chan error, 1)
	go func() { killed <- r.m.Kill(r.ctx(), "i1") }()
	if err := <-killed; err != nil {
		t.Fatal(err)
	}
	cancel() // a real VMM's call ends with its process
	wantCode(t, <-kept, apierr.NotFound)
	r.gone("i1")
	r.onShelf()
}

// A snapshot that fails leaves the sandbox running and nothing else, and the next one succeeds.
func TestASnapshotThatFails(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	r.w.setMemory("i1", "m")
	r.w.setHook(func(_ context.Context, op, _ string) error {
		if op == "checkpoint" {
			return errors.New("no")
		}
		return nil
	})
	_, err := r.m.KeepSnapshot(r.ctx(), "i1", "s1")
	wantCode(t, err, apierr.NotReady)
	r.onShelf()
	r.w.setHook(nil)
	if !s.View().Usable() {
		t.Error("it does not run on")
	}
	r.keep(s, "s2")
	r.from("s2", "i2")
	r.wantMemory("i2", "m")
	r.pause(s)
	r.resume(s)
	r.wantMemory("i1", "m")

	r.layers.fill(true)
	_, err = r.m.KeepSnapshot(r.ctx(), "i1", "s3")
	wantCode(t, err, apierr.DiskFull)
	r.layers.fill(false)
	r.w.die("i1")
	r.until(s, "stopped", func(v View) bool { return v.VM() == Stopped })
	_, err = r.m.KeepSnapshot(r.ctx(), "i1", "s4")
	wantCode(t, err, apierr.NotReady)
	_, err = r.m.KeepSnapshot(r.ctx(), "nobody", "s5")
	wantCode(t, err, apierr.NotFound)
	r.onShelf("s2")
}

// Any number of snapshots of one run leaves a chain of disk layers that is bounded, in the sandbox and in the snapshots.
func TestManySnapshotsOfOneRun(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	for i := range 4 * maxChain {
		info := r.keep(s, fmt.Sprintf("s%d", i))
		if n := len(info.Manifest.Layers); n > 2*maxChain {
			t.Errorf("snapshot %d has %d disk layers", i, n)
		}
		r.tidied(s)
	}
	if n := len(s.View().Layers); n > maxChain+2 {
		t.Errorf("the sandbox has %d disk layers", n)
	}
	r.from("s0", "i2")
	r.from(fmt.Sprintf("s%d", 4*maxChain-1), "i3")
}

// Deleting a snapshot while something is made from it: what is made has all it needs, or was refused.
func TestDeleteDuringACreate(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	r.w.setMemory("i1", "m")
	r.keep(s, "s1")
	arrived, release := r.holdAt("restore")
	created := make(chan error, 1)
	go func() {
		_, err := r.m.Create(r.ctx(), CreateRequest{ID: "i2", SnapshotID: "s1", Timeout: time.Hour})
		created <- err
	}()
	<-arrived
	deleted := make(chan error, 1)
	go func() { deleted <- r.m.DeleteSnapshot("s1") }()
	release()
	if err := errors.Join(<-created, <-deleted); err != nil {
		t.Fatal(err)
	}
	r.wantMemory("i2", "m")
	r.onShelf()
}

func TestFork(t *testing.T) {
	r := newRig(t)
	s := r.create("i1", func(c *CreateRequest) { c.Env = map[string]string{"A": "b"} })
	r.w.setMemory("i1", "m")
	before := s.View()
	r.w.setHook(func(_ context.Context, op, name string) error {
		if op == "start" && name == "c2" {
			return errors.New("this one does not start")
		}
		return nil
	})
	req := ForkRequest{ParentID: "i1", Timeout: time.Minute, Children: []Child{{"c0", "t0"}, {"c1", "t1"}, {"c2", "t2"}}}
	results, err := r.m.Fork(r.ctx(), req)
	if err != nil || len(results) != 3 {
		t.Fatalf("%v, %v", results, err)
	}
	for i, f := range results {
		if i == 2 {
			wantCode(t, f.Err, apierr.NotReady)
			if child := r.m.find("c2"); child != nil {
				<-child.gone
			}
			r.gone("c2")
			continue
		}
		id := fmt.Sprintf("c%d", i)
		if f.Err != nil || !f.View.Usable() || f.View.ID != id || f.View.OnTimeout != "pause" || !f.View.AutoResume || f.View.Timeout != time.Minute {
			t.Errorf("fork %d: %+v, %v", i, f.View, f.Err)
		}
		r.wantMemory(id, "m")
		if child := r.get(id); child.token != fmt.Sprintf("t%d", i) || child.rec.Env["A"] != "b" {
			t.Errorf("%s has token %q, environment %v", id, child.token, child.rec.Env)
		}
	}
	if v := s.View(); !v.Usable() || v.Incarnation != before.Incarnation || r.w.count("checkpoint") != 1 {
		t.Errorf("the parent is %+v after %d checkpoints", v, r.w.count("checkpoint"))
	}
	r.onShelf()
	if len(r.snapshotIDs()) != 0 {
		t.Error("what a fork is made from is listed")
	}
	r.w.setHook(nil)
	r.pause(s)
	if _, err := r.m.Fork(r.ctx(), ForkRequest{ParentID: "i1", Timeout: time.Minute, Children: []Child{{"c3", "t3"}}}); err != nil {
		t.Fatal(err)
	}
	if s.View().VM() != Paused {
		t.Error("forking woke the parent")
	}
	r.wantMemory("c3", "m")
}

func TestForkRefusesWhatItCannotMake(t *testing.T) {
	r := newRig(t)
	r.create("i1")
	many := make([]Child, MaxForks+1)
	for i := range many {
		many[i].ID = fmt.Sprintf("c%d", i)
	}
	for name, c := range map[string]struct {
		req  ForkRequest
		code apierr.Code
	}{
		"none":       {ForkRequest{ParentID: "i1", Timeout: time.Minute}, apierr.BadRequest},
		"too many":   {ForkRequest{ParentID: "i1", Timeout: time.Minute, Children: many}, apierr.BadRequest},
		"twice":      {ForkRequest{ParentID: "i1", Timeout: time.Minute, Children: []Child{{ID: "c"}, {ID: "c"}}}, apierr.BadRequest},
		"itself":     {ForkRequest{ParentID: "i1", Timeout: time.Minute, Children: []Child{{ID: "i1"}}}, apierr.BadRequest},
		"bad id":     {ForkRequest{ParentID: "i1", Timeout: time.Minute, Children: []Child{{ID: "../c"}}}, apierr.BadRequest},
		"no timeout": {ForkRequest{ParentID: "i1", Children: []Child{{ID: "c"}}}, apierr.BadRequest},
		"no parent":  {ForkRequest{ParentID: "nobody", Timeout: time.Minute, Children: []Child{{ID: "c"}}}, apierr.NotFound},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := r.m.Fork(r.ctx(), c.req)
			wantCode(t, err, c.code)
		})
	}
	if r.w.count("checkpoint") != 0 || len(r.m.List()) != 1 {
		t.Error("something was begun")
	}
	r.onShelf()
}

// What a frozen sandbox is kept as is its generation; it stays frozen.
func TestASnapshotAndAForkOfAFrozenSandbox(t *testing.T) {
	r := newRig(t)
	r.freezes()
	s := r.create("i1")
	r.w.setMemory("i1", "m")
	r.pause(s)
	r.keep(s, "s1")
	if _, err := r.m.Fork(r.ctx(), ForkRequest{ParentID: "i1", Timeout: time.Minute, Children: []Child{{"c1", "t1"}}}); err != nil {
		t.Fatal(err)
	}
	if v := s.View(); v.VM() != Paused || v.Tier != TierFrozen {
		t.Errorf("it is %s, %s", v.State, v.Tier)
	}
	r.wantMemory("c1", "m")
	r.from("s1", "i2")
	r.wantMemory("i2", "m")
	r.resume(s)
	r.w.setMemory("i1", "later")
	r.keep(s, "s2") // of a VM that was frozen and runs on
	r.from("s2", "i3")
	r.wantMemory("i3", "later")
}

// The memory of snapshots, of what is made from them, and so on, is a chain that is bounded.
func TestGenerationsOfForks(t *testing.T) {
	r := newRig(t)
	id := "i0"
	r.create(id)
	for n := range 3 * maxMemoryChain {
		want := fmt.Sprintf("memory %d", n)
		r.w.setMemory(id, want)
		snapshotID := fmt.Sprintf("s%d", n)
		info := r.keep(r.get(id), snapshotID)
		if got := len(info.Manifest.Memory); got > maxMemoryChain {
			t.Errorf("snapshot %d has %d memory layers", n, got)
		}
		child := fmt.Sprintf("i%d", n+1)
		r.from(snapshotID, child)
		r.wantMemory(child, want)
		if err := errors.Join(r.m.DeleteSnapshot(snapshotID), r.m.Kill(r.ctx(), id)); err != nil {
			t.Fatal(err)
		}
		id = child
	}
}
