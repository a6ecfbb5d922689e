package machine

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/rs/zerolog"

	"torpor/vmm/guestmem"
	"torpor/vmm/snapshot"
	"torpor/vmm/x86"
)

const mib = 1 << 20

func TestGuestRunsAndSeesItsDevices(t *testing.T) {
	m := bootTiny(t, testConfig(1, 128*mib))
	counts(t, m, 0)
	if magic := m.peek(t, tinyMagic); magic != 0x74726976 {
		t.Errorf("virtio magic read as %#x", magic)
	}
	if s := m.Status(); s.State != Running || s.IOExits == 0 || s.MMIOExits == 0 || s.Exits < s.IOExits {
		t.Errorf("status %+v", s)
	}
}

// rounds is n, or a quarter of it under -test.short, which the emulated host asks for, being slow: the full number runs on
// the local KVM where there is one, and on hardware.
func rounds(n int) int {
	if testing.Short() {
		return (n + 3) / 4
	}
	return n
}

func TestPauseStopsAndResumeGoesOn(t *testing.T) {
	for _, vcpus := range []int{1, 2, 4} {
		m := bootTiny(t, testConfig(vcpus, 128*mib))
		for range rounds(20) {
			counts(t, m, m.peek(t, tinyCounter))
			if err := m.Pause(); err != nil {
				t.Fatal(err)
			}
			if err := m.Pause(); err != nil { // idempotent
				t.Fatal(err)
			}
			before, exits := m.peek(t, tinyCounter), m.Status().Exits
			for range 1000 {
				if m.peek(t, tinyCounter) != before || m.Status().Exits != exits {
					t.Fatal("a paused guest ran")
				}
			}
			if err := m.Resume(); err != nil {
				t.Fatal(err)
			}
			if err := m.Resume(); err != nil { // idempotent
				t.Fatal(err)
			}
		}
	}
}

func TestGuestEnds(t *testing.T) {
	for _, c := range []struct {
		name    string
		command byte
		reason  Reason
	}{{"reset", tinyReset, ReasonReset}, {"power-off", tinyPowerOff, ReasonPowerOff}, {"triple fault", tinyFault, ReasonReset}} {
		t.Run(c.name, func(t *testing.T) {
			m := bootTiny(t, testConfig(2, 128*mib))
			counts(t, m, 0)
			m.poke(t, tinyCommand, c.command)
			<-m.Done()
			if m.End().Reason != c.reason {
				t.Errorf("ended by %+v", m.End())
			}
			if err := m.Pause(); !errors.Is(err, ErrEnded) {
				t.Errorf("pause of an ended guest: %v", err)
			}
			if s := m.Status(); s.State != Ended || s.End.Reason != c.reason {
				t.Errorf("status %+v", s)
			}
		})
	}
}

// save pauses and saves m and returns the snapshot's files; base is empty for a full save.
func save(t *testing.T, m *Machine, base string) (savedFiles, Saved) {
	t.Helper()
	dir := t.TempDir()
	s := savedFiles{state: filepath.Join(dir, "state"), base: base}
	kind, memory := SaveCumulative, filepath.Join(dir, "mem.diff")
	if base == "" {
		s.base = filepath.Join(dir, "mem")
		kind, memory = SaveFull, s.base
	} else {
		s.diff = memory
	}
	if err := m.Pause(); err != nil {
		t.Fatal(err)
	}
	saved, err := saveTo(t, m, kind, s.state, memory)
	if err != nil {
		t.Fatal(err)
	}
	return s, saved
}

func verify(t *testing.T, s savedFiles) {
	t.Helper()
	state, err := snapshot.ReadState(s.state)
	if err == nil {
		err = snapshot.VerifyMemory(s.base, state)
	}
	if err == nil && s.diff != "" {
		err = snapshot.VerifyLayers(state, append(slices.Clone(s.below), s.diff)...)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestSaveAndRestoreInAChain(t *testing.T) {
	for _, cfg := range []Config{testConfig(1, 128*mib), testConfig(4, 256*mib), testConfig(2, 4096*mib)} {
		t.Run(fmt.Sprintf("%d vCPUs, %d MiB", cfg.VCPUs, cfg.MemoryBytes/mib), func(t *testing.T) { testChain(t, cfg) })
	}
}

func testChain(t *testing.T, cfg Config) {
	t.Helper()
	m := bootTiny(t, cfg)
	counts(t, m, 0)
	full, saved := save(t, m, "")
	if saved.DataPages == 0 || saved.DataPages > 200 || saved.DataPages+saved.ZeroPages != cfg.MemoryBytes/4096 {
		t.Errorf("full save of a tiny guest: %+v", saved)
	}
	verify(t, full)
	last := m.peek(t, tinyCounter)
	if err := m.Resume(); err != nil {
		t.Fatal(err)
	}
	counts(t, m, last)

	from := full
	for range 5 {
		r := restoreTiny(t, cfg, from)
		if n := r.peek(t, tinyCounter); n != last {
			t.Fatalf("counter restored as %d, was %d", n, last)
		}
		if err := r.Resume(); err != nil {
			t.Fatal(err)
		}
		counts(t, r, last)
		from, saved = save(t, r, full.base)
		if saved.DataPages > 20 {
			t.Errorf("diff of a tiny guest: %+v", saved)
		}
		verify(t, from)
		last = r.peek(t, tinyCounter)
	}
}

// memory reads all of a guest's RAM.
func memory(t *testing.T, m *Machine) []byte {
	t.Helper()
	var out []byte
	for _, r := range m.ram.mem.Regions() {
		b := make([]byte, len(r.Bytes))
		if err := m.ram.mem.ReadAt(b, r.GPA); err != nil {
			t.Fatal(err)
		}
		out = append(out, b...)
	}
	return out
}

// A diff must bring back memory bit by bit, whatever was written: long runs that are mapped, short ones that are copied, pages
// that became zero, pages written back to what they were, pages given back by the balloon, and all of it again on top of an
// earlier diff.
func TestDiffIsExact(t *testing.T) {
	cfg := testConfig(1, 128*mib)
	m := bootTiny(t, cfg)
	counts(t, m, 0)
	if err := m.Pause(); err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	fill := func(m *Machine, page, n uint64) {
		b := make([]byte, n*4096)
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		m.poke(t, guestmem.Addr(page*4096), b...)
	}
	fill(m, 0x3000, 0x800) // so that there is something to become zero again
	full, _ := save(t, m, "")
	from, mapped := full, 0
	for round := range rounds(6) {
		r := restoreTiny(t, cfg, from)
		dirty := uint64(0)
		for range 60 {
			page, n := 0x3000+rng.Uint64N(0x4000), 1+rng.Uint64N(8)
			if rng.Uint32()%8 == 0 {
				n = 16 + rng.Uint64N(300)
			}
			dirty += n
			switch rng.Uint32() % 4 {
			case 0:
				if err := r.ram.mem.Zero(guestmem.Addr(page*4096), n*4096); err != nil {
					t.Fatal(err)
				}
			case 1:
				fill(r, page, n)
			case 2: // back to the base
				b := make([]byte, n*4096)
				if _, err := r.ram.from.base.ReadAt(b, int64(page*4096)); err != nil {
					t.Fatal(err)
				}
				r.poke(t, guestmem.Addr(page*4096), b...)
			case 3: // given back: to the base, to the diff it is mapped from, or to zeros
				discard := r.ram.Discard
				if rng.Uint32()%2 == 0 {
					discard = r.ram.mem.Discard
				}
				if _, err := discard(guestmem.Addr(page*4096), n*4096); err != nil {
					t.Fatal(err)
				}
			}
		}
		want := memory(t, r)
		var saved Saved
		from, saved = save(t, r, full.base)
		verify(t, from)
		got := restoreTiny(t, cfg, from)
		if !bytes.Equal(memory(t, got), want) {
			t.Fatalf("round %d: restored memory differs", round)
		}
		t.Logf("round %d: %d pages touched, %+v, %d ranges mapped", round, dirty, saved, len(got.ram.inherited))
		mapped += len(got.ram.inherited)
	}
	if mapped == 0 {
		t.Error("no run was mapped: the test does not test that")
	}
}

func TestHighMemoryIsSaved(t *testing.T) {
	cfg := testConfig(1, 4096*mib)
	m := bootTiny(t, cfg)
	const low, high = guestmem.Addr(x86.HoleAddr - 4096), guestmem.Addr(x86.HoleEnd)
	m.poke(t, low, 1, 2, 3)
	m.poke(t, high, 4, 5, 6)
	full, _ := save(t, m, "")
	r := restoreTiny(t, cfg, full)
	r.poke(t, low+8, 7)
	r.poke(t, high+8, 8)
	diff, _ := save(t, r, full.base)
	r2 := restoreTiny(t, cfg, diff)
	if r2.peek(t, low) != 0x030201 || r2.peek(t, low+8) != 7 || r2.peek(t, high) != 0x060504 || r2.peek(t, high+8) != 8 {
		t.Errorf("%#x %#x %#x %#x", r2.peek(t, low), r2.peek(t, low+8), r2.peek(t, high), r2.peek(t, high+8))
	}
}

func TestSaveNeverOverwrites(t *testing.T) {
	m := bootTiny(t, testConfig(1, 128*mib))
	full, _ := save(t, m, "")
	r := restoreTiny(t, testConfig(1, 128*mib), full)
	fresh := func() *os.File { return openFile(t, filepath.Join(t.TempDir(), "new"), os.O_CREATE|os.O_RDWR) }
	state, memory := fresh(), openFile(t, full.base, os.O_RDWR)
	if _, err := r.Save(SaveOptions{Kind: SaveCumulative}, state, memory); !errors.Is(err, ErrConfig) {
		t.Errorf("save onto the mapped base: %v", err)
	}
	checkClosed(t, state, memory)
	if _, err := r.Save(SaveOptions{Kind: SaveCumulative}, openFile(t, full.state, os.O_RDWR), fresh()); !errors.Is(err, ErrConfig) {
		t.Errorf("save onto a state file: %v", err)
	}
	verify(t, full)
}

func TestOperationsAreRefusedByName(t *testing.T) {
	m := bootTiny(t, testConfig(1, 128*mib))
	fresh := func() string { return filepath.Join(t.TempDir(), "new") }
	if _, err := saveTo(t, m, SaveFull, fresh(), fresh()); !errors.Is(err, ErrNotPaused) {
		t.Errorf("save of a running machine: %v", err)
	}
	full, _ := save(t, m, "")
	if _, err := saveTo(t, m, SaveCumulative, fresh(), fresh()); !errors.Is(err, ErrConfig) {
		t.Errorf("diff without a base: %v", err)
	}
	for name, cfg := range map[string]Config{
		"vCPUs": testConfig(2, 128*mib), "memory": testConfig(1, 256*mib),
		"console": {Host: testHost(), VCPUs: 1, MemoryBytes: 128 * mib},
	} {
		if _, _, err := Restore(cfg, full.open(t), true, zerolog.Nop()); !errors.As(err, new(*snapshot.Error)) {
			t.Errorf("restore with other %s: %v", name, err)
		}
	}
	mixed := savedFiles{state: full.state, base: full.base, diff: full.base}
	if _, _, err := Restore(testConfig(1, 128*mib), mixed.open(t), true, zerolog.Nop()); !errors.As(err, new(*snapshot.Error)) {
		t.Errorf("restore of a full snapshot with what is no layer: %v", err)
	}
}

// A base that is cut short under a running machine costs that machine a failed save, not the process.
func TestTruncatedBaseIsAnError(t *testing.T) {
	m := bootTiny(t, testConfig(1, 128*mib))
	counts(t, m, 0)
	full, _ := save(t, m, "")
	r := restoreTiny(t, testConfig(1, 128*mib), full)
	if err := os.Truncate(full.base, 4096); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if _, err := saveTo(t, r, SaveFull, filepath.Join(dir, "state"), filepath.Join(dir, "mem")); err == nil {
		t.Error("saved memory that is not there")
	}
}

// What a restored machine says of itself, before it has run, is what was saved: nothing is dropped or changed on the way in.
func TestRestoredStateIsTheSavedState(t *testing.T) {
	cfg := testConfig(2, 128*mib)
	m := bootTiny(t, cfg)
	counts(t, m, 0)
	full, _ := save(t, m, "")
	again, saved := save(t, restoreTiny(t, cfg, full), full.base)
	if saved.DataPages != 0 {
		t.Errorf("a machine that did not run has a diff: %+v", saved)
	}
	a, err := snapshot.ReadState(full.state)
	if err != nil {
		t.Fatal(err)
	}
	b, err := snapshot.ReadState(again.state)
	if err != nil {
		t.Fatal(err)
	}
	if a.Clock != b.Clock {
		t.Errorf("clock %d, was %d", b.Clock, a.Clock)
	}
	for i := range a.VCPUs {
		sameVCPU(t, i, &a.VCPUs[i], &b.VCPUs[i])
	}
	for i := range a.IRQChips {
		if !bytes.Equal(a.IRQChips[i], b.IRQChips[i]) {
			t.Errorf("interrupt controller %d differs", i)
		}
	}
	for i := range a.Devices {
		if a.Devices[i].Name != b.Devices[i].Name || !bytes.Equal(a.Devices[i].Data, b.Devices[i].Data) {
			t.Errorf("device %s differs", a.Devices[i].Name)
		}
	}
}

func sameVCPU(t *testing.T, id int, a, b *snapshot.VCPU) {
	t.Helper()
	for name, block := range map[string][2][]byte{
		"regs": {a.Regs, b.Regs}, "sregs": {a.Sregs, b.Sregs}, "xsave": {a.XSave, b.XSave}, "xcrs": {a.XCRs, b.XCRs},
		"debugregs": {a.DebugRegs, b.DebugRegs}, "lapic": {a.LAPIC, b.LAPIC}, "events": {a.Events, b.Events}, "cpuid": {a.CPUID, b.CPUID},
	} {
		if !bytes.Equal(block[0], block[1]) {
			t.Errorf("vCPU %d: %s\nis  %x\nwas %x", id, name, block[1], block[0])
		}
	}
	if a.MPState != b.MPState || a.TSCKHz != b.TSCKHz || len(a.MSRs) != len(b.MSRs) {
		t.Errorf("vCPU %d: MP state %d, was %d; TSC %d kHz, was %d; %d MSRs, were %d",
			id, b.MPState, a.MPState, b.TSCKHz, a.TSCKHz, len(b.MSRs), len(a.MSRs))
	}
	for i := range min(len(a.MSRs), len(b.MSRs)) {
		was, is := a.MSRs[i], b.MSRs[i]
		moved := is.Index == x86.MSRTSC && is.Data >= was.Data
		if is != was && !moved {
			t.Errorf("vCPU %d: MSR %#x is %#x, was %#x", id, is.Index, is.Data, was.Data)
		}
	}
}

// The same, with memory that no longer comes from a file: tells a fault of the mapping from one of the vCPU state.
func TestRestoredGuestRunsOnPopulatedMemory(t *testing.T) {
	cfg := testConfig(1, 128*mib)
	m := bootTiny(t, cfg)
	counts(t, m, 0)
	full, _ := save(t, m, "")
	last := m.peek(t, tinyCounter)
	r := restoreTiny(t, cfg, full)
	for page := uint64(0); page < r.ram.pages(); page++ {
		b := r.ram.slice(page, 1)
		b[0] ^= 1
		b[0] ^= 1
	}
	if err := r.Resume(); err != nil {
		t.Fatal(err)
	}
	counts(t, r, last)
}
