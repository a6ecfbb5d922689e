package sandbox

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"torpor/agent/snapcache"
	"torpor/agent/store"
	"torpor/api/apierr"
	"torpor/api/vmmpb"
)

// remembers checks that a guest has in its memory a trace of every incarnation it was greeted in.
func (r *rig) remembers(id string, incarnations ...uint64) {
	r.t.Helper()
	r.w.mu.Lock()
	defer r.w.mu.Unlock()
	var got []uint64
	for _, n := range slices.Sorted(maps.Keys(r.w.procs[id].memory)) {
		if n > 0 {
			got = append(got, n)
		}
	}
	if !slices.Equal(got, incarnations) {
		r.t.Errorf("the guest remembers the incarnations %d, want %d", got, incarnations)
	}
}

func (r *rig) manifest(s *Sandbox) snapcache.Manifest {
	r.t.Helper()
	m, err := snapcache.Manifested(s.paths.generation(s.View().Generation))
	if err != nil {
		r.t.Fatal(err)
	}
	return m
}

// untilTidied waits for the operation and then for the background work that is under way.
func (r *rig) untilTidied(s *Sandbox) {
	r.t.Helper()
	var op *operation
	for s.do(func() { op = s.op }) && op != nil {
		<-op.done
	}
	var t *task
	s.do(func() { t = s.tidying })
	if t != nil {
		<-t.done
	}
}

func TestPlanWritesAsLittleAsItCan(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	r.pause(s)
	r.resume(s)
	chain := r.manifest(s).Memory
	for name, tc := range map[string]struct {
		change func(*store.Sandbox)
		kind   vmmpb.SaveKind
		base   string
		memory []string
	}{
		"from the template":  {func(r *store.Sandbox) { r.Base = 0 }, vmmpb.SaveKind_SAVE_KIND_DIFF, "", []string{"mem-9"}},
		"from a generation":  {func(*store.Sandbox) {}, vmmpb.SaveKind_SAVE_KIND_DIFF, "", append(slices.Clone(chain), "mem-9")},
		"booted":             {func(r *store.Sandbox) { r.Base, r.Booted = 0, true }, vmmpb.SaveKind_SAVE_KIND_FULL, "mem-9", []string{}},
		"its base is lost":   {func(r *store.Sandbox) { r.Base = 7 }, vmmpb.SaveKind_SAVE_KIND_FULL, "mem-9", []string{}},
		"from a full memory": {func(r *store.Sandbox) { r.Base = 100 }, vmmpb.SaveKind_SAVE_KIND_DIFF, "all", []string{"one", "mem-9"}},
		"too long a chain":   {func(r *store.Sandbox) { r.Base = 101 }, vmmpb.SaveKind_SAVE_KIND_CUMULATIVE, "all", []string{"mem-9"}},
		"an old format":      {func(r *store.Sandbox) { r.Base = 102 }, vmmpb.SaveKind_SAVE_KIND_CUMULATIVE, "", []string{"mem-9"}},
	} {
		t.Run(name, func(t *testing.T) {
			forge(t, s, 100, "all", "one")
			forge(t, s, 101, "all", "a", "b", "c", "d")
			forge(t, s, 102, "", oldMemoryFile)
			rec := s.View().Sandbox
			tc.change(&rec)
			p := s.planGeneration(rec, 9)
			if p.kind != tc.kind || p.manifest.Base != tc.base || !slices.Equal(p.manifest.Memory, tc.memory) {
				t.Errorf("%s of base %q and layers %q", p.kind, p.manifest.Base, p.manifest.Memory)
			}
		})
	}
}

// forge publishes a generation of the given memory files.
func forge(t *testing.T, s *Sandbox, n uint64, base string, memory ...string) {
	t.Helper()
	dir := s.paths.generation(n)
	if err := snapcache.Remove(dir); err != nil {
		t.Fatal(err)
	}
	draft, err := snapcache.Begin(dir)
	if err != nil {
		t.Fatal(err)
	}
	m := snapcache.Manifest{Generation: n, Base: base, Memory: memory}
	for _, name := range m.MemoryFiles() {
		if err := os.WriteFile(draft.Path(name), []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := draft.Publish(m); err != nil {
		t.Fatal(err)
	}
}

func TestSuperfluousGenerations(t *testing.T) {
	for _, tc := range []struct {
		all          []uint64
		base, newest uint64
		want         []uint64
	}{
		{nil, 0, 0, nil},
		{[]uint64{1}, 0, 1, nil},
		{[]uint64{1, 2}, 1, 2, nil},               // 2 has not been resumed: 1 stays
		{[]uint64{1, 2}, 2, 2, []uint64{1}},       // it has
		{[]uint64{1, 2, 3}, 1, 3, nil},            // 1 is the newest that is known to be good, 2 the one before
		{[]uint64{1, 2, 3, 4}, 1, 4, []uint64{2}}, // 2 was never resumed and has been replaced
		{[]uint64{1, 2, 3}, 0, 3, []uint64{1}},    // booted: none is known to be good
		{[]uint64{3, 4}, 3, 3, nil},               // 4 is being made
	} {
		if got := superfluous(tc.all, tc.base, tc.newest); !slices.Equal(got, tc.want) {
			t.Errorf("of %d with base %d and newest %d: %d, want %d", tc.all, tc.base, tc.newest, got, tc.want)
		}
	}
}

// Over any number of cycles the chain, the generations and the layers stay few, and nothing is lost.
func TestManyCyclesLoseNothingAndStayBounded(t *testing.T) {
	for _, frozen := range []bool{false, true} {
		t.Run(fmt.Sprintf("frozen=%v", frozen), func(t *testing.T) {
			r := newRig(t)
			if frozen {
				r.freezes()
			}
			s := r.create("i1")
			want := []uint64{1}
			for n := uint64(2); n < 25; n++ {
				r.pause(s)
				m := r.manifest(s)
				if len(m.Memory) > maxMemoryChain {
					t.Fatalf("a chain of %d", len(m.Memory))
				}
				if n%7 == 0 && frozen {
					s.Demote("test")
				}
				r.untilTidied(s)
				r.verifyAll("i1")
				r.resume(s)
				want = append(want, n)
				r.remembers("i1", want...)
				r.untilTidied(s)
				if g := s.generations(); len(g) > 3 {
					t.Fatalf("generations %d", g)
				}
				if l := r.kept("i1"); len(l) > 2*maxChain+maxTops {
					t.Fatalf("layers %q", l)
				}
			}
		})
	}
}

// freezes makes the rig's agent keep the VMs of paused sandboxes.
func (r *rig) freezes() { r.restart(func() { r.cfg.FrozenFor = 1 << 40 }) }

func TestPreviousGenerationStaysUntilTheNewOneWasResumed(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	r.w.fill("i1")
	r.pause(s)
	r.resume(s)
	r.pause(s)
	r.untilTidied(s)
	if g := s.generations(); !slices.Equal(g, []uint64{1, 2}) {
		t.Errorf("generations %d after the second pause", g)
	}
	r.resume(s)
	r.untilTidied(s)
	if g := s.generations(); !slices.Equal(g, []uint64{2}) {
		t.Errorf("generations %d after the second resume", g)
	}
}

// Every kind of file, damaged in every way: the previous generation serves, and says so; without one a clear error names the part,
// and a cold boot serves when it is asked for. Others are unharmed and the sandbox can be removed.
func TestDamageOfEveryFile(t *testing.T) {
	type damage struct {
		name string
		do   func(path string) error
	}
	ways := []damage{
		{"flipped", flip},
		{"truncated", func(p string) error { return os.Truncate(p, 3) }},
		{"deleted", os.Remove},
	}
	for _, part := range []string{stateFile, "mem-", "manifest.json", "layer"} {
		for _, way := range ways {
			for _, previous := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/%s/previous=%v", part, way.name, previous), func(t *testing.T) {
					r := newRig(t)
					other := r.create("other")
					s := r.create("i1")
					r.w.fill("i1")
					if previous {
						r.pause(s)
						r.resume(s)
					}
					r.w.setMemory("i1", "new")
					v := r.pause(s)
					r.untilTidied(s)
					name := damageOne(t, s, v, part, way.do)
					checkDamaged(t, r, s, name, previous, part == "layer")
					r.pause(other)
					r.resume(other)
					if err := r.m.Kill(r.ctx(), "i1"); err != nil {
						t.Error(err)
					}
					r.gone("i1")
				})
			}
		}
	}
}

func flip(path string) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	raw[len(raw)/2] ^= 1
	return os.WriteFile(path, raw, 0o600)
}

// damageOne damages the part of the newest generation and returns the name of the file.
func damageOne(t *testing.T, s *Sandbox, v View, part string, do func(string) error) string {
	t.Helper()
	path := s.paths.layer(v.Layers[len(v.Layers)-1])
	if part != "layer" {
		found, err := filepath.Glob(filepath.Join(s.paths.generation(v.Generation), part+"*"))
		if err != nil || len(found) == 0 {
			t.Fatalf("no %s: %v", part, err)
		}
		path = found[len(found)-1]
	}
	if part == "layer" && do != nil {
		writeBlock(t, path)
	}
	if err := do(path); err != nil {
		t.Fatal(err)
	}
	return filepath.Base(path)
}

// writeBlock makes sure that there is something to be damaged: the header, which every byte of is checked.
func writeBlock(t *testing.T, path string) {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil { // it may be linked
		t.Fatal(err)
	}
	if err := os.WriteFile(path, raw[:min(len(raw), 4096)], 0o600); err != nil {
		t.Fatal(err)
	}
}

func checkDamaged(t *testing.T, r *rig, s *Sandbox, name string, previous, disk bool) {
	t.Helper()
	v, _, err := s.Resume(r.ctx(), 0)
	if previous {
		if err != nil || v.ResumeMode != ModePrevious || r.w.memory("i1") == "new" {
			t.Fatalf("resumed from %q with memory %q: %v", v.ResumeMode, r.w.memory("i1"), err)
		}
		if !r.hasEvent("i1", Running, "resumed from: previous") || !r.hasEvent("i1", Running, name) {
			t.Error("no event says so and names the part")
		}
		return
	}
	wantCode(t, err, apierr.SandboxBroken)
	if err == nil || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "memory:false") {
		t.Fatalf("the error does not name %s and the way out: %v", name, err)
	}
	if v := s.View(); v.VM() != Failed {
		t.Errorf("it is %s", v.State)
	}
	v, _, err = s.Wake(r.ctx(), WakeRequest{Cold: true})
	if disk {
		wantCode(t, err, apierr.SandboxBroken)
		return
	}
	if err != nil || v.ResumeMode != ModeCold || r.w.memory("i1") != "booted" {
		t.Errorf("cold: %q, %v", v.ResumeMode, err)
	}
}

// A damaged template is found too, and is not blamed on the sandbox's own files.
func TestDamagedTemplateMemory(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	r.pause(s)
	path := r.templates.t.Snapshot.Path("mem")
	if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, _, err := s.Resume(r.ctx(), 0)
	wantCode(t, err, apierr.SandboxBroken)
	if err == nil || !strings.Contains(err.Error(), "template") || !strings.Contains(err.Error(), "mem") {
		t.Errorf("got %v", err)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	r.resume(s)
}

func TestColdBootLeavesTheMemoryImageAlone(t *testing.T) {
	for _, frozen := range []bool{false, true} {
		t.Run(fmt.Sprintf("frozen=%v", frozen), func(t *testing.T) {
			r := newRig(t)
			if frozen {
				r.freezes()
			}
			s := r.create("i1")
			r.w.setMemory("i1", "kept")
			first := r.pause(s)
			v, resumed, err := s.Wake(r.ctx(), WakeRequest{Cold: true})
			if err != nil || !resumed || !v.Usable() || v.ResumeMode != ModeCold || r.w.memory("i1") != "booted" {
				t.Fatalf("%+v, %v", v, err)
			}
			if v.Incarnation != first.Incarnation+1 || !r.hasEvent("i1", Running, "resumed from: cold") {
				t.Errorf("incarnation %d after %d", v.Incarnation, first.Incarnation)
			}
			r.verifyAll("i1")
			if v.Generation != first.Generation {
				t.Errorf("generation %d", v.Generation)
			}
			r.w.die("i1") // what ran cold is lost, and the image is what it was
			r.until(s, "stopped", func(v View) bool { return v.VM() == Stopped })
			if v := r.resume(s); v.ResumeMode != ModeMemory || r.w.memory("i1") != "kept" {
				t.Errorf("resumed from %s with %q", v.ResumeMode, r.w.memory("i1"))
			}
			// The next pause of a cold run replaces it, with a memory of its own.
			r.pause(s)
			if _, _, err := s.Wake(r.ctx(), WakeRequest{Cold: true}); err != nil {
				t.Fatal(err)
			}
			r.w.setMemory("i1", "cold memory")
			r.pause(s)
			if m := r.manifest(s); m.Base == "" || len(m.Memory) != 0 {
				t.Errorf("base %q, layers %q", m.Base, m.Memory)
			}
			s.Demote("test")
			r.resume(s)
			r.pause(s)
			if m := r.manifest(s); m.Base == "" || len(m.Memory) != 1 {
				t.Errorf("then base %q, layers %q", m.Base, m.Memory)
			}
			s.Demote("test")
			if r.resume(s); r.w.memory("i1") != "cold memory" {
				t.Errorf("memory %q", r.w.memory("i1"))
			}
		})
	}
}

// A sandbox that never was paused and whose VM ended has its disk still.
func TestColdBootWithoutASnapshot(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	r.w.die("i1")
	r.until(s, "stopped", func(v View) bool { return v.VM() == Stopped })
	_, _, err := s.Resume(r.ctx(), 0)
	wantCode(t, err, apierr.SandboxBroken)
	if v, _, err := s.Wake(r.ctx(), WakeRequest{Cold: true}); err != nil || v.ResumeMode != ModeCold || len(v.Layers) != 2 {
		t.Errorf("%+v, %v", v, err)
	}
}

// A pause that cannot find room is refused before anything is done to the VM; one that runs out of room in the middle is undone.
func TestNoRoomForASnapshot(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	r.layers.leave(r.cfg.Reserve + 1<<20) // the VM has 1 MiB resident, and the state takes room as well
	_, err := s.Pause(r.ctx())
	wantCode(t, err, apierr.DiskFull)
	if r.w.count("pause") != 0 || r.w.count("save") != 0 {
		t.Error("the VM was touched")
	}
	if v := s.View(); !v.Usable() {
		t.Errorf("it is %s", v.State)
	}
	r.layers.leave(1 << 40)
	r.w.failOnce("save", apierr.New(apierr.DiskFull, "full: %w", syscall.ENOSPC))
	_, err = s.Pause(r.ctx())
	wantCode(t, err, apierr.DiskFull)
	if v := s.View(); !v.Usable() {
		t.Errorf("it is %s", v.State)
	}
	r.pause(s)
	r.resume(s)
	r.remembers("i1", 1, 2)
}

// A sandbox that sleeps on disk has its layers merged, and the old generation stays until the new one was resumed.
func TestMemoryLayersAreMergedInTheBackground(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	for range 2 {
		r.pause(s)
		r.resume(s)
	}
	before := r.pause(s).Generation
	r.untilTidied(s)
	v := s.View()
	m := r.manifest(s)
	if v.Generation == before || len(m.Memory) != 1 || m.Merged != before {
		t.Errorf("generation %d after %d, of %q, merged from %d", v.Generation, before, m.Memory, m.Merged)
	}
	r.verifyAll("i1")
	if !slices.Contains(s.generations(), before) {
		t.Errorf("the generation it was made of is gone: %d", s.generations())
	}
	r.resume(s)
	r.remembers("i1", 1, 2, 3, 4)
	r.untilTidied(s)
	if g := s.generations(); !slices.Equal(g, []uint64{v.Generation}) {
		t.Errorf("generations %d", g)
	}
}

func TestWorthMerging(t *testing.T) {
	for _, tc := range []struct {
		sizes []uint64
		want  bool
	}{
		{nil, false},
		{[]uint64{100}, false},
		{[]uint64{100, 12}, false},
		{[]uint64{100, 13}, true},
		{[]uint64{100, 6, 6}, false},
		{[]uint64{1000, 1, 1, 1}, true}, // the next pause would have no room in the chain
	} {
		if got := worthMerging(tc.sizes); got != tc.want {
			t.Errorf("%d: %v", tc.sizes, got)
		}
	}
}
