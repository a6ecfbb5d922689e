package machine

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/rs/zerolog"
	"golang.org/x/sys/unix"

	"torpor/vmm/guestmem"
	"torpor/vmm/snapshot"
	"torpor/vmm/x86"
)

// saveLayer saves a layer over from, which m was restored from, and returns the longer chain.
func saveLayer(t *testing.T, m *Machine, from savedFiles) (savedFiles, Saved) {
	t.Helper()
	dir := t.TempDir()
	next := savedFiles{state: filepath.Join(dir, "state"), base: from.base, diff: filepath.Join(dir, "mem.layer"), below: from.layers()}
	if err := m.Pause(); err != nil {
		t.Fatal(err)
	}
	saved, err := saveTo(t, m, SaveDiff, next.state, next.diff)
	if err != nil {
		t.Fatal(err)
	}
	return next, saved
}

func (s savedFiles) layers() []string {
	if s.diff == "" {
		return nil
	}
	return append(append([]string{}, s.below...), s.diff)
}

// merged is s with its layers made one.
func (s savedFiles) merged(t *testing.T) savedFiles {
	t.Helper()
	var files []*os.File
	for _, path := range s.layers() {
		f := openFile(t, path, os.O_RDONLY)
		defer f.Close()
		files = append(files, f)
	}
	out := savedFiles{state: s.state, base: s.base, diff: filepath.Join(t.TempDir(), "merged")}
	dst := openFile(t, out.diff, os.O_CREATE|os.O_EXCL|os.O_RDWR)
	defer dst.Close()
	if _, err := snapshot.Merge(dst, files...); err != nil {
		t.Fatal(err)
	}
	return out
}

// window is the part of memory a test works in.
type window struct{ page, pages uint64 } // of the flat image

func (w window) read(t *testing.T, m *Machine) []byte {
	t.Helper()
	var out []byte
	for page := w.page; page < w.page+w.pages; {
		b := m.ram.slice(page, w.page+w.pages-page)
		out = append(out, b...)
		page += uint64(len(b)) / snapshot.PageSize
	}
	return out
}

// scribble changes memory within the window in every way there is. Addresses are of the flat image.
func (w window) scribble(t *testing.T, m *Machine, rng *rand.Rand, times int) {
	t.Helper()
	for range times {
		page, n := w.page+rng.Uint64N(w.pages-400), 1+rng.Uint64N(8)
		if rng.Uint32()%8 == 0 {
			n = 16 + rng.Uint64N(300)
		}
		b := m.ram.slice(page, n)
		n = uint64(len(b)) / snapshot.PageSize
		base := make([]byte, len(b))
		if _, err := m.ram.from.base.ReadAt(base, int64(page*snapshot.PageSize)); err != nil {
			t.Fatal(err)
		}
		var err error
		switch rng.Uint32() % 7 {
		case 0:
			clear(b)
		case 1, 2:
			for i := range b {
				b[i] = byte(rng.Uint32())
			}
		case 3:
			copy(b, base)
		case 4: // written, and the same
			copy(b, bytes.Clone(b))
		case 5: // given back: to the base, to the layer it is mapped from, or to zeros
			discard := m.ram.Discard
			if rng.Uint32()%2 == 0 {
				discard = m.ram.mem.Discard
			}
			_, err = discard(gpa(page), n*snapshot.PageSize)
		case 6: // to swap, where there is some
			_ = unix.Madvise(b, unix.MADV_PAGEOUT)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// gpa is the guest-physical address of a page of the flat image.
func gpa(page uint64) guestmem.Addr {
	if a := page * snapshot.PageSize; a >= x86.HoleAddr {
		return guestmem.Addr(a - x86.HoleAddr + x86.HoleEnd)
	}
	return guestmem.Addr(page * snapshot.PageSize)
}

// Whatever is written, and however long the chain is, memory comes back bit by bit, and a layer has no more than what changed. What
// the layers are merged to, and a layer over the base alone, are the same memory.
func TestChainOfLayersIsExact(t *testing.T) {
	for _, c := range []struct {
		size   uint64
		within window
	}{{128 * mib, window{0x3000, 0x4000}}, {4096 * mib, window{x86.HoleAddr/snapshot.PageSize - 0x1000, 0x2000}}} {
		t.Run(fmt.Sprintf("%d MiB", c.size/mib), func(t *testing.T) { testLayers(t, testConfig(1, c.size), c.within) })
	}
}

func testLayers(t *testing.T, cfg Config, w window) {
	t.Helper()
	m := bootTiny(t, cfg)
	counts(t, m, 0)
	if err := m.Pause(); err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(3, 4))
	for page := w.page; page < w.page+w.pages/2; page++ { // so that the base has something
		m.ram.slice(page, 1)[0] = byte(rng.Uint32())
	}
	from, _ := save(t, m, "")
	mapped, based, rebuilt := 0, uint64(0), 0
	for round := range rounds(12) {
		r := restoreTiny(t, cfg, from)
		mapped += len(r.ram.inherited)
		before := w.read(t, r)
		w.scribble(t, r, rng, 60)
		want := w.read(t, r)
		next, saved := saveLayer(t, r, from)
		verify(t, next)
		based += saved.BasePages
		if changed := storable(before, want); float64(saved.DataPages) > 1.05*float64(changed)+20 {
			t.Errorf("round %d: %d pages stored, %d changed", round, saved.DataPages, changed)
		}
		t.Logf("round %d: %d layers, %+v", round, len(next.layers()), saved)
		cumulative, _ := save(t, r, from.base)
		for name, s := range map[string]savedFiles{"chain": next, "merged": next.merged(t), "cumulative": cumulative} {
			if got := w.read(t, restoreTiny(t, cfg, s)); !bytes.Equal(got, want) {
				t.Fatalf("round %d, %s: restored memory differs", round, name)
			}
		}
		switch from = next; round % 4 {
		case 1:
			from, rebuilt = next.merged(t), rebuilt+1
		case 3:
			from = cumulative
		}
		verify(t, from)
	}
	if mapped == 0 || based == 0 || rebuilt == 0 {
		t.Errorf("%d ranges mapped, %d pages as in the base, %d merges gone on from: the test does not test all of it", mapped, based, rebuilt)
	}
}

// storable counts the pages that changed to something that is not zero.
func storable(before, after []byte) (n uint64) {
	for at := 0; at < len(after); at += snapshot.PageSize {
		now := after[at : at+snapshot.PageSize]
		if !bytes.Equal(now, before[at:at+snapshot.PageSize]) && !isZero(now) {
			n++
		}
	}
	return n
}

// layered is a saved machine of two layers, with long runs in both, which are mapped, and short ones, which are read.
func layered(t *testing.T, cfg Config) savedFiles {
	t.Helper()
	m := bootTiny(t, cfg)
	counts(t, m, 0)
	from, _ := save(t, m, "")
	for i := range 2 {
		r := restoreTiny(t, cfg, from)
		for j, b := range r.ram.slice(0x4000+uint64(i)*0x200, 0x100) {
			r.ram.slice(0x4000+uint64(i)*0x200, 0x100)[j] = b + byte(j) | 1
		}
		r.poke(t, 0x3000*snapshot.PageSize, byte(i+1))
		from, _ = saveLayer(t, r, from)
	}
	return from
}

// A flipped byte in a layer is told by name, whether it is found before the guest runs or while it does.
func TestDamagedLayerIsFoundAndNamed(t *testing.T) {
	cfg := testConfig(1, 128*mib)
	good := layered(t, cfg)
	if r := restoreTiny(t, cfg, good); r.ram.verifier.wait() != nil {
		t.Fatal("a good snapshot failed")
	}
	damage := func(layer string, at int64) savedFiles {
		s := good
		raw, err := os.ReadFile(layer)
		if err != nil {
			t.Fatal(err)
		}
		if at < 0 {
			at += int64(len(raw))
		}
		raw[at] ^= 0x10
		bad := filepath.Join(t.TempDir(), "bad")
		if err := os.WriteFile(bad, raw, 0o600); err != nil {
			t.Fatal(err)
		}
		if layer == good.diff {
			s.diff = bad
		} else {
			s.below = []string{bad}
		}
		return s
	}
	for _, c := range []struct {
		name string
		s    savedFiles
		part string
	}{
		{"header of the first", damage(good.below[0], 40), "memory layer 1, header"},
		{"table of the second", damage(good.diff, -20), "memory layer 2, table of runs"},
		{"a short run", damage(good.diff, 4096+5), "memory layer 2, pages "},
		{"a long run", damage(good.below[0], 3*4096+mib/2), "memory layer 1, pages "},
		{"the wrong order", savedFiles{state: good.state, base: good.base, below: []string{good.diff}, diff: good.below[0]}, "memory layer 1, header"},
		{"one left out", savedFiles{state: good.state, base: good.base, diff: good.diff}, "memory layer 1, header"},
		{"one too few", savedFiles{state: good.state, base: good.base, diff: good.below[0]}, "memory layer 1, header"},
		{"none", savedFiles{state: good.state, base: good.base}, "state"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, _, err := Restore(cfg, c.s.open(t), false, zerolog.Nop())
			if err == nil {
				defer closeMachine(t, m)
				<-m.Done()
				if end := m.End(); end.Reason != ReasonMemory || !bytes.Contains([]byte(end.Detail), []byte(c.part)) {
					t.Errorf("ended by %+v", end)
				}
				dir := t.TempDir()
				_, err = saveTo(t, m, SaveDiff, filepath.Join(dir, "s"), filepath.Join(dir, "m"))
			}
			var broken *snapshot.Error
			if !errors.As(err, &broken) || !bytes.HasPrefix([]byte(broken.Part), []byte(c.part)) {
				t.Errorf("error %v, want one about %q", err, c.part)
			}
		})
	}
}

// What is written in a second is bounded, and what is not bounded is the same.
func TestSaveKeepsToItsRate(t *testing.T) {
	cfg := testConfig(1, 128*mib)
	m := bootTiny(t, cfg)
	full, _ := save(t, m, "")
	r := restoreTiny(t, cfg, full)
	b := r.ram.slice(0x4000, 0x400)
	for i := range b {
		b[i] = byte(i) | 1
	}
	if err := r.Pause(); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	took := map[uint64]int64{}
	for _, rate := range []uint64{0, 16 * mib} {
		state, memory := filepath.Join(dir, fmt.Sprint("s", rate)), filepath.Join(dir, fmt.Sprint("m", rate))
		const create = os.O_CREATE | os.O_EXCL | os.O_RDWR
		var err error
		c := measure(t, func() {
			_, err = r.Save(SaveOptions{Kind: SaveDiff, BytesPerSecond: rate}, openFile(t, state, create), openFile(t, memory, create))
		})
		if err != nil {
			t.Fatal(err)
		}
		took[rate] = c.clock.Milliseconds()
		if f := openFile(t, memory, os.O_RDONLY); rate > 0 {
			if n, err := f.Seek(0, io.SeekEnd); err != nil || n < 4*mib {
				t.Errorf("%d bytes, %v", n, err)
			}
			f.Close()
		}
	}
	// Of 4 MiB a tenth of a second's may come at once, and the last of four pieces may leave a debt.
	if took[16*mib] < 70 {
		t.Errorf("took %d ms within the limit, %d without", took[16*mib], took[0])
	}
}

func TestSnapshotOfAnotherKVMIsRefused(t *testing.T) {
	cfg := testConfig(1, 128*mib)
	m := bootTiny(t, cfg)
	full, _ := save(t, m, "")
	state, err := snapshot.ReadState(full.state)
	if err != nil {
		t.Fatal(err)
	}
	if state.Host != cfg.Host.kernel || state.Host.Kernel == "" || state.Host.KVM == "" {
		t.Errorf("saved on %+v", state.Host)
	}
	other := func(change func(*snapshot.Host)) error {
		s := *state
		change(&s.Host)
		from := full
		from.state = filepath.Join(t.TempDir(), "state")
		if err := os.WriteFile(from.state, s.Encode(), 0o600); err != nil {
			t.Fatal(err)
		}
		m, _, err := Restore(cfg, from.open(t), true, zerolog.Nop())
		if err == nil {
			closeMachine(t, m)
		}
		return err
	}
	if err := other(func(h *snapshot.Host) { h.KVM = "kvm_other" }); !errors.Is(err, ErrCPU) {
		t.Errorf("of another KVM: %v", err)
	}
	if err := other(func(h *snapshot.Host) { h.Kernel += "-next" }); err != nil {
		t.Errorf("of another release: %v", err)
	}
}
