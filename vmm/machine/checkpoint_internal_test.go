package machine

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"torpor/vmm/cow"
	"torpor/vmm/guestmem"
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

// The writing guest counts, and writes each number to a row of pages before it takes the next.
const (
	rowFrom  = guestmem.Addr(0x4000000)
	rowPages = 4096
)

var writingCode = []byte{
	0x48, 0xc7, 0xc3, 0, 0, 0, 0x02, //         mov rbx, tinyCounter
	0x48, 0xff, 0x03, //                  loop: inc qword [rbx]
	0x48, 0x8b, 0x03, //                        mov rax, [rbx]
	0x48, 0xc7, 0xc1, 0, 0, 0, 0x04, //         mov rcx, rowFrom
	0xba, rowPages & 0xff, rowPages >> 8, 0, 0, // mov edx, rowPages
	0x48, 0x89, 0x01, //                  row:  mov [rcx], rax
	0x48, 0x81, 0xc1, 0, 0x10, 0, 0, //         add rcx, 4096
	0xff, 0xca, //                              dec edx
	0x75, 0xf2, //                              jnz row
	0xeb, 0xde, //                              jmp loop
}

// What is saved is memory at one instant: a row that is being written has new numbers up to some page, the last ones from
// there on, and nothing else, however fast the guest writes meanwhile.
func TestCheckpointIsOneInstant(t *testing.T) {
	cfg := testConfig(1, 128*mib)
	m := bootCode(t, cfg, writingCode)
	counts(t, m, 0)
	full, _, _ := checkpoint(t, m, "")
	r := restoreTiny(t, cfg, full)
	if err := r.Resume(); err != nil {
		t.Fatal(err)
	}
	torn := 0
	for range rounds(20) {
		counts(t, r, r.peek(t, tinyCounter))
		diff, _, _ := checkpoint(t, r, full.base)
		after := r.peek(t, tinyCounter)
		child := restoreTiny(t, cfg, diff)
		last := child.peek(t, tinyCounter)
		if last > after {
			t.Errorf("saved at %d, the machine is at %d", last, after)
		}
		for page := range guestmem.Addr(rowPages) {
			n := child.peek(t, rowFrom+page*4096)
			if n != last && n != last-1 || n > last {
				t.Fatalf("page %d has %d at %d", page, n, last)
			}
			if n == last-1 {
				last, torn = n, torn+1 // from here on, all are of the round before
			}
		}
	}
	t.Logf("%d rows were being written", torn)
}

// descriptors is how many there are.
func descriptors(t *testing.T) int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(fds)
}

// children are the processes this one has, ended ones that were not waited for included.
func children(t *testing.T) (pids []int) {
	t.Helper()
	tasks, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil || len(tasks) == 0 {
		t.Fatalf("this kernel does not list children: %v", err)
	}
	for _, path := range tasks {
		if raw, err := os.ReadFile(path); err == nil { // else the thread has ended
			for _, field := range strings.Fields(string(raw)) {
				pid, err := strconv.Atoi(field)
				if err != nil {
					t.Fatal(err)
				}
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

func TestCheckpointsLeaveNothing(t *testing.T) {
	cfg := testConfig(1, 128*mib)
	m := bootTiny(t, cfg)
	counts(t, m, 0)
	full, _, _ := checkpoint(t, m, "")
	r := restoreTiny(t, cfg, full)
	if err := r.Resume(); err != nil {
		t.Fatal(err)
	}
	checkpoint(t, r, full.base) // what is made once
	before, resident := descriptors(t), testHost().residentBytes()
	for range 100 {
		checkpoint(t, r, full.base)
	}
	if now := descriptors(t); now != before {
		t.Errorf("%d descriptors before, %d after", before, now)
	}
	if pids := children(t); len(pids) != 0 {
		t.Errorf("children %v", pids)
	}
	if now := testHost().residentBytes(); now > resident+32*mib {
		t.Errorf("%d bytes resident before, %d after", resident, now)
	}
}

// Checkpoints of a machine that was itself restored from layers are layers over those: only what it wrote since.
func TestCheckpointIsALayerOverTheChain(t *testing.T) {
	cfg := testConfig(1, 128*mib)
	m := bootTiny(t, cfg)
	counts(t, m, 0)
	const at = guestmem.Addr(0x3000000)
	block := bytes.Repeat([]byte("first "), 100*4096/6)
	m.poke(t, at, block...)
	from, _, _ := checkpoint(t, m, "")
	for generation := range 3 {
		r := restoreTiny(t, cfg, from)
		if err := r.Resume(); err != nil {
			t.Fatal(err)
		}
		r.poke(t, at+guestmem.Addr(generation)*20*4096, bytes.Repeat([]byte{byte(generation + 1)}, 10*4096)...)
		if _, err := r.ram.Discard(at+60*4096, 20*4096); err != nil { // back to the base, or to the layer it is mapped from
			t.Fatal(err)
		}
		want := make([]byte, len(block))
		if err := r.ram.mem.ReadAt(want, at); err != nil {
			t.Fatal(err)
		}
		const create = os.O_CREATE | os.O_EXCL | os.O_RDWR
		dir := t.TempDir()
		next := savedFiles{state: filepath.Join(dir, "state"), base: from.base, diff: filepath.Join(dir, "layer"), below: from.layers()}
		saved, _, err := r.Checkpoint(t.Context(), Checkpoint{
			Kind: SaveDiff, State: openFile(t, next.state, create), Memory: openFile(t, next.diff, create), BytesPerSecond: 1 << 40,
		})
		if err != nil {
			t.Fatal(err)
		}
		if saved.DataPages < 10 || saved.DataPages > 30 {
			t.Errorf("generation %d: %+v", generation, saved)
		}
		verify(t, next)
		child := restoreTiny(t, cfg, next)
		got := make([]byte, len(block))
		if err := child.ram.mem.ReadAt(got, at); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("generation %d: memory differs", generation)
		}
		from = next
	}
}
