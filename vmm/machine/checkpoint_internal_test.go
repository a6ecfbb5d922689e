package machine

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"torpor/vmm/cow"
)

// checkpoint takes one of m and returns the snapshot's files; base is empty for a full one.
func checkpoint(t *testing.T, m *Machine, base string, tops ...*os.File) (savedFiles, Saved, time.Duration) {
	t.Helper()
	const create = os.O_CREATE | os.O_EXCL | os.O_RDWR
	dir := t.TempDir()
	s := savedFiles{state: filepath.Join(dir, "state"), base: base}
	to := Checkpoint{Kind: SaveCumulative, State: openFile(t, s.state, create), Tops: tops}
	if base == "" {
		s.base = filepath.Join(dir, "mem")
		to.Kind, to.Memory = SaveFull, openFile(t, s.base, create)
	} else {
		s.diff = filepath.Join(dir, "mem.diff")
		to.Memory = openFile(t, s.diff, create)
	}
	saved, stopped, err := m.Checkpoint(t.Context(), to)
	if err != nil {
		t.Fatal(err)
	}
	return s, saved, stopped
}

// The machine runs on, and what was saved of it runs too, from where the machine was then.
func TestCheckpointOfARunningMachine(t *testing.T) {
	cfg := testConfig(2, 128*mib)
	m := bootTiny(t, cfg)
	counts(t, m, 0)
	full, _, _ := checkpoint(t, m, "")
	verify(t, full)
	r := restoreTiny(t, cfg, full)
	if err := r.Resume(); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		counts(t, r, r.peek(t, tinyCounter))
		before := r.peek(t, tinyCounter)
		diff, _, stopped := checkpoint(t, r, full.base)
		verify(t, diff)
		after := r.peek(t, tinyCounter)
		child := restoreTiny(t, cfg, diff)
		if n := child.peek(t, tinyCounter); n < before || n > after {
			t.Errorf("saved at %d, which was between %d and %d", n, before, after)
		}
		counts(t, r, after)
		if err := child.Resume(); err != nil {
			t.Fatal(err)
		}
		counts(t, child, child.peek(t, tinyCounter))
		if stopped <= 0 {
			t.Errorf("stood still for %v", stopped)
		}
	}
	if s := r.Status(); s.State != Running {
		t.Errorf("status %+v", s)
	}
}

// What is refused changes nothing, and takes no file along.
func TestCheckpointRefuses(t *testing.T) {
	cfg, _ := fullConfig(t)
	m := bootTiny(t, cfg)
	counts(t, m, 0)
	dir := t.TempDir()
	files := func() Checkpoint {
		for _, name := range []string{"state", "mem", "top"} {
			_ = os.Remove(filepath.Join(dir, name))
		}
		const create = os.O_CREATE | os.O_EXCL | os.O_RDWR
		if err := cow.Create(filepath.Join(dir, "top"), mib); err != nil {
			t.Fatal(err)
		}
		return Checkpoint{
			Kind: SaveFull, State: openFile(t, filepath.Join(dir, "state"), create), Memory: openFile(t, filepath.Join(dir, "mem"), create),
			Tops: []*os.File{openFile(t, filepath.Join(dir, "top"), os.O_RDWR)},
		}
	}
	refused := func(name string, to Checkpoint, want error) {
		t.Helper()
		_, _, err := m.Checkpoint(t.Context(), to)
		if err == nil || want != nil && !errors.Is(err, want) {
			t.Errorf("%s: %v", name, err)
		}
		checkClosed(t, to.State, to.Memory)
		for _, top := range to.Tops {
			checkClosed(t, top)
		}
	}
	to := files()
	to.Kind = SaveCumulative
	refused("a diff without a base", to, ErrConfig)
	to = files()
	to.Tops = append(to.Tops, openFile(t, filepath.Join(dir, "top"), os.O_RDWR))
	refused("a top too many", to, ErrConfig)
	to = files()
	if _, err := to.Memory.WriteString("x"); err != nil {
		t.Fatal(err)
	}
	refused("a file with something in it", to, ErrConfig)
	to = files()
	if err := to.Tops[0].Truncate(10); err != nil {
		t.Fatal(err)
	}
	refused("a top that is no layer", to, nil)
	counts(t, m, m.peek(t, tinyCounter))
	if err := m.Pause(); err != nil {
		t.Fatal(err)
	}
	refused("a machine that is paused", files(), ErrNotRunning)
	if err := m.Resume(); err != nil {
		t.Fatal(err)
	}
	good := files()
	if _, _, err := m.Checkpoint(t.Context(), good); err != nil {
		t.Fatal(err)
	}
	checkClosed(t, good.State, good.Memory)
	counts(t, m, m.peek(t, tinyCounter))
	m.poke(t, tinyCommand, tinyReset)
	<-m.Done()
	refused("a guest that has ended", files(), ErrEnded)
}

// The disk of the snapshot is that of the instant; what is written afterwards is in the new top alone.
func TestCheckpointSwapsTheTops(t *testing.T) {
	cfg, _ := fullConfig(t)
	m := bootTiny(t, cfg)
	counts(t, m, 0)
	disk, old := m.disks[0], cfg.Disks[0].Top.Name()
	if _, err := disk.WriteAt([]byte("before"), 0); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "next")
	if err := cow.Create(path, mib); err != nil {
		t.Fatal(err)
	}
	checkpoint(t, m, "", openFile(t, path, os.O_RDWR))
	if _, err := disk.WriteAt([]byte("after!"), 0); err != nil {
		t.Fatal(err)
	}
	for name, layers := range map[string][]string{"before": {old}, "after!": {old, path}} {
		if err := disk.Flush(); err != nil {
			t.Fatal(err)
		}
		c, err := cow.OpenChain("", layers, "")
		if err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 6)
		if _, err := c.ReadAt(got, 0); err != nil || string(got) != name {
			t.Errorf("%s: read %q, %v", name, got, err)
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// A machine that is saved with new tops runs on and leaves alone what was saved.
func TestSaveSwapsTheTops(t *testing.T) {
	cfg, _ := fullConfig(t)
	m := bootTiny(t, cfg)
	counts(t, m, 0)
	disk, old := m.disks[0], cfg.Disks[0].Top.Name()
	if _, err := disk.WriteAt([]byte("before"), 0); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	if err := cow.Create(in("next"), mib); err != nil {
		t.Fatal(err)
	}
	if err := m.Pause(); err != nil {
		t.Fatal(err)
	}
	const create = os.O_CREATE | os.O_EXCL | os.O_RDWR
	two := []*os.File{openFile(t, in("next"), os.O_RDWR), openFile(t, in("next"), os.O_RDWR)}
	if _, err := m.Save(SaveOptions{Kind: SaveFull, Tops: two}, openFile(t, in("s1"), create), openFile(t, in("m1"), create)); !errors.Is(err, ErrConfig) {
		t.Errorf("a top too many: %v", err)
	}
	checkClosed(t, two[0], two[1])
	top := []*os.File{openFile(t, in("next"), os.O_RDWR)}
	if _, err := m.Save(SaveOptions{Kind: SaveFull, Tops: top}, openFile(t, in("s2"), create), openFile(t, in("m2"), create)); err != nil {
		t.Fatal(err)
	}
	if _, err := disk.WriteAt([]byte("after!"), 0); err != nil {
		t.Fatal(err)
	}
	if err := m.Resume(); err != nil {
		t.Fatal(err)
	}
	counts(t, m, m.peek(t, tinyCounter))
	saved, err := cow.OpenChain("", []string{old}, "")
	if err != nil {
		t.Fatal(err)
	}
	defer saved.Close()
	got := make([]byte, 6)
	if _, err := saved.ReadAt(got, 0); err != nil || string(got) != "before" {
		t.Errorf("saved disk reads %q, %v", got, err)
	}
}
