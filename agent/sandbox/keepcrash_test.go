package sandbox

import (
	"errors"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"torpor/agent/durable"
	"torpor/agent/kept"
	"torpor/agent/powercut"
	"torpor/api/apierr"
)

var errCrash = errors.New("the agent is dead")

// crasher is a file system that ends with the n-th operation after it was armed, and with it the agent: nothing is done any more.
type crasher struct {
	mu     sync.Mutex
	armed  bool
	left   int
	points []string
	dead   bool
	strike func() // what happens instead of the agent's end; nil: it ends
	struck bool
	ended  chan struct{} // closed at the agent's end; may be nil
}

func (c *crasher) before(point string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case !c.armed:
		return nil
	case c.dead:
		return errCrash
	}
	c.points = append(c.points, point)
	c.left--
	if c.left == 0 && c.strike != nil {
		c.struck = true
		c.strike()
		return nil
	}
	c.dead = c.left == 0
	if c.dead {
		if c.ended != nil {
			close(c.ended)
		}
		return errCrash
	}
	return nil
}

func (c *crasher) arm(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.armed, c.left, c.points = true, n, nil
}

func (c *crasher) crashed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.dead
}

// on has the rig's agent work by another file system.
func (r *rig) on(fs durable.FS) {
	r.t.Helper()
	r.m.Close()
	shelf, err := kept.Open(filepath.Join(r.dir, "snapshots"), fs)
	if err != nil {
		r.t.Fatal(err)
	}
	r.cfg.FS, r.cfg.Kept = fs, shelf
	r.open()
}

// everyCrash does something once for every operation on files that it consists of, and ends the agent at that; then again with the
// power cut as well, so that only what was synced is left. Each time a new agent starts, and check looks at what it finds.
func everyCrash(t *testing.T, prepare func(*rig), do func(*rig) error, check func(r *rig)) {
	for _, power := range []bool{false, true} {
		name := "killed"
		if power {
			name = "power cut"
		}
		t.Run(name, func(t *testing.T) {
			var points []string
			for n := 1; ; n++ {
				r := newRig(t)
				c := &crasher{}
				fs := powercut.New(t.TempDir(), c.before)
				r.on(fs)
				prepare(r)
				c.arm(n)
				err := do(r)
				if !c.crashed() {
					if err != nil {
						t.Fatal(err)
					}
					t.Logf("%d points: %v", len(c.points), c.points)
					points = c.points
					break
				}
				r.m.Close()
				if power {
					if err := fs.Cut(); err != nil {
						t.Fatal(err)
					}
				}
				r.cfg.FS = durable.OS{}
				r.cfg.Kept = r.shelf()
				r.open()
				check(r)
				if t.Failed() {
					t.Fatalf("after the end at %q (%d)", c.points[len(c.points)-1], n)
				}
			}
			if len(points) < 3 {
				t.Errorf("only %v was cut", points)
			}
		})
	}
}

// However the making of a snapshot ends, there is a whole one or none, and the sandbox goes on.
func TestCrashWhileASnapshotIsMade(t *testing.T) {
	for _, of := range []string{"running", "paused"} {
		t.Run(of, func(t *testing.T) {
			everyCrash(t, func(r *rig) {
				s := r.create("i1")
				r.w.setMemory("i1", "m")
				if of == "paused" {
					r.pause(s)
				}
			}, func(r *rig) error {
				_, err := r.m.KeepSnapshot(r.ctx(), "i1", "s1")
				return err
			}, func(r *rig) {
				s := r.get("i1")
				if v := s.View(); string(v.VM()) != of {
					r.t.Errorf("it is %s", v.State)
				}
				ids := r.snapshotIDs()
				r.onShelf(ids...)
				if len(ids) > 0 {
					r.from("s1", "i2")
					r.wantMemory("i2", "m")
				}
				r.resume(s)
				r.wantMemory("i1", "m")
				r.pause(s)
				r.resume(s)
				r.wantMemory("i1", "m")
				r.keep(s, "s2") // nothing of the first is in the way
				if err := r.m.Kill(r.ctx(), "i1"); err != nil {
					r.t.Error(err)
				}
				r.gone("i1")
			})
		})
	}
}

// A sandbox that was being made of a snapshot is gone, as one that was being made of a template is; the snapshot is there.
func TestCrashWhileASandboxIsMadeOfASnapshot(t *testing.T) {
	everyCrash(t, func(r *rig) {
		s := r.create("i1")
		r.w.setMemory("i1", "m")
		r.keep(s, "s1")
	}, func(r *rig) error {
		_, err := r.m.Create(r.ctx(), CreateRequest{ID: "i2", SnapshotID: "s1", Timeout: time.Hour})
		return err
	}, func(r *rig) {
		if s := r.m.find("i2"); s != nil {
			<-s.gone
		}
		r.gone("i2")
		_, err := r.m.Create(r.ctx(), CreateRequest{ID: "i2", SnapshotID: "s1", Timeout: time.Hour})
		wantCode(r.t, err, apierr.Gone)
		r.from("s1", "i3")
		r.wantMemory("i3", "m")
	})
}

// A rollback happened or did not, and the sandbox is whole.
func TestCrashDuringARollback(t *testing.T) {
	everyCrash(t, func(r *rig) {
		s := r.create("i1")
		r.w.setMemory("i1", "then")
		r.keep(s, "s1")
		r.w.setMemory("i1", "now")
		r.pause(s)
	}, func(r *rig) error {
		_, err := r.m.Rollback(r.ctx(), "i1", "s1")
		return err
	}, func(r *rig) {
		s := r.get("i1")
		v := s.View()
		if v.VM() != Paused {
			r.t.Errorf("it is %s", v.State)
		}
		want := map[uint64]string{1: "now", 2: "then"}[v.Generation]
		if got := s.generations(); !slices.Contains(got, v.Generation) || slices.Max(got) != v.Generation {
			r.t.Errorf("generation %d is recorded, there are %v", v.Generation, got)
		}
		r.resume(s)
		r.wantMemory("i1", want)
		r.rollback(s, "s1")
		r.wantMemory("i1", "then")
	})
}

// A snapshot that was being deleted is there or is not.
func TestCrashWhileASnapshotIsDeleted(t *testing.T) {
	everyCrash(t, func(r *rig) {
		s := r.create("i1")
		r.w.setMemory("i1", "m")
		r.keep(s, "s1")
		r.from("s1", "i2")
	}, func(r *rig) error {
		return r.m.DeleteSnapshot("s1")
	}, func(r *rig) {
		ids := r.snapshotIDs()
		r.onShelf(ids...)
		if len(ids) > 0 {
			r.from("s1", "i3")
			r.wantMemory("i3", "m")
		}
		r.pause(r.get("i2"))
		r.resume(r.get("i2"))
		r.wantMemory("i2", "m")
	})
}
