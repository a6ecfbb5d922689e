package machine

import (
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"torpor/vmm/guestmem"
	"torpor/vmm/snapshot"
	"torpor/vmm/x86"
)

const gib = 1 << 30

// marks are addresses whose place in a file does not fit 31 or 32 bits, at both sides of every border, for a given size of RAM.
func marks(size uint64) []guestmem.Addr {
	var out []guestmem.Addr
	for _, r := range x86.RAM(size) {
		for _, a := range []uint64{r.Addr + 0x4000000, r.Addr + r.Size/2, r.Addr + r.Size - 4096} {
			out = append(out, guestmem.Addr(a))
		}
	}
	for _, a := range []guestmem.Addr{2*gib - 4096, 2 * gib, 8 * gib, 12*gib + 4096} {
		if uint64(a)+4096 <= x86.RAM(size)[0].Size || uint64(a) >= x86.HoleEnd && uint64(a)+4096 <= x86.HoleEnd+size-x86.HoleAddr {
			out = append(out, a)
		}
	}
	return out
}

// Memory files beyond 2 and 4 GiB: Firecracker panicked on the first (#1929) and saved wrong diffs with two memory slots
// (#5696). Files and memory are sparse, so this costs what is touched.
func TestLargeMemoryIsSavedAndRestored(t *testing.T) {
	for _, size := range []uint64{5 * gib / 2, 4 * gib, 16 * gib} {
		t.Run(fmt.Sprintf("%d MiB", size/mib), func(t *testing.T) { testLargeMemory(t, testConfig(2, size)) })
	}
}

func testLargeMemory(t *testing.T, cfg Config) {
	t.Helper()
	at := marks(cfg.MemoryBytes)
	check := func(m *Machine, round byte) {
		t.Helper()
		for i, a := range at {
			if got, want := m.peek(t, a), uint64(round)<<8|uint64(i+1); got != want {
				t.Errorf("round %d: %#x at %#x, want %#x", round, got, uint64(a), want)
			}
		}
	}
	write := func(m *Machine, round byte) {
		for i, a := range at {
			m.poke(t, a, byte(i+1), round)
		}
	}
	m := bootTiny(t, cfg)
	counts(t, m, 0)
	write(m, 0)
	full, saved := save(t, m, "")
	verify(t, full)
	sparse(t, full.base, cfg.MemoryBytes, saved)
	from := full
	for round := range byte(3) {
		r := restoreTiny(t, cfg, from)
		check(r, round)
		if err := r.Resume(); err != nil {
			t.Fatal(err)
		}
		counts(t, r, r.peek(t, tinyCounter))
		write(r, round+1)
		from, saved = save(t, r, full.base)
		if min := uint64(len(at)); saved.DataPages < min || saved.DataPages > min+20 {
			t.Errorf("round %d: diff of %d pages, %d were written", round, saved.DataPages, min)
		}
		verify(t, from)
	}

	// A full save of a restored machine reads neither the holes of its base nor what nobody wrote.
	last := restoreTiny(t, cfg, from)
	before := last.Status().ResidentBytes
	again, saved := save(t, last, "")
	if grown := int64(last.Status().ResidentBytes - before); grown > 256*mib {
		t.Errorf("a full save made %d MiB resident", grown/mib)
	}
	verify(t, again)
	sparse(t, again.base, cfg.MemoryBytes, saved)
	check(restoreTiny(t, cfg, again), 3)
}

// sparse fails the test unless the flat image is as long as memory and takes little room.
func sparse(t *testing.T, path string, size uint64, saved Saved) {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	if uint64(info.Size()) != size || st.Blocks*512 > 16*mib || saved.DataPages+saved.ZeroPages != size/snapshot.PageSize {
		t.Errorf("flat image of %d bytes, %d on disk, %+v", info.Size(), st.Blocks*512, saved)
	}
}

// Eight vCPUs, the most there are, each with its own APIC id, stop and go on together.
func TestMostVCPUs(t *testing.T) {
	cfg := testConfig(x86.MaxVCPUs, 128*mib)
	m := bootTiny(t, cfg)
	counts(t, m, 0)
	full, _ := save(t, m, "")
	state, err := snapshot.ReadState(full.state)
	if err != nil {
		t.Fatal(err)
	}
	for id, v := range state.VCPUs {
		if apic := v.LAPIC[0x23]; int(apic) != id { // the xAPIC id register, bits 31:24 (SDM volume 3, section 11.4.6)
			t.Errorf("vCPU %d has APIC id %d", id, apic)
		}
	}
	r := restoreTiny(t, cfg, full)
	if err := r.Resume(); err != nil {
		t.Fatal(err)
	}
	counts(t, r, r.peek(t, tinyCounter))
}
