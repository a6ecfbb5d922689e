package machine

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/rs/zerolog"

	"torpor/vmm/guestmem"
	"torpor/vmm/snapshot"
	"torpor/vmm/virtio"
	"torpor/vmm/x86"
)

// lump is where the tests put much memory: page number and pages, far from what the tiny guest touches.
const (
	lump      = 0x3000
	lumpPages = 1024
	lumpAddr  = guestmem.Addr(lump * snapshot.PageSize)
	lumpBytes = lumpPages * snapshot.PageSize
)

func (m *Machine) fillLump(t *testing.T, with byte) {
	t.Helper()
	m.poke(t, lumpAddr, bytes.Repeat([]byte{with}, lumpBytes)...)
}

func (m *Machine) discard(t *testing.T, a guestmem.Addr, n uint64) {
	t.Helper()
	got, err := m.ram.Discard(a, n)
	if err != nil || got != n {
		t.Fatalf("discarded %d bytes of %d: %v", got, n, err)
	}
}

// lumpHolds fails unless every page of the lump begins with the given byte.
func (m *Machine) lumpHolds(t *testing.T, want byte) {
	t.Helper()
	for page := range guestmem.Addr(lumpPages) {
		if got := m.peek(t, lumpAddr+page*snapshot.PageSize); byte(got) != want {
			t.Fatalf("page %d of the lump has %d, want %d", page, byte(got), want)
		}
	}
}

// Memory that was given back is saved as what the guest finds there afterwards, on every kind of mapping a generation can
// have: anonymous (zeros), of the base (its bytes), of a diff (the diff's bytes in short pieces, the base's in long ones),
// anonymous over a zero run (the same). And it costs nothing where it has become what lies below.
func TestDiscardedMemoryIsSavedAsTheGuestSeesIt(t *testing.T) {
	cfg := testConfig(1, 128*mib)
	generation := 0
	// next saves m and restores that, and checks that nothing has changed. It returns how many pages were stored.
	next := func(m *Machine, base string) (*Machine, savedFiles, uint64) {
		t.Helper()
		generation++
		all := memory
		if testing.Short() { // emulated hosts are slow
			all = func(t *testing.T, m *Machine) []byte { return m.ram.slice(lump-16, lumpPages+32) }
		}
		want := bytes.Clone(all(t, m))
		s, saved := save(t, m, base)
		verify(t, s)
		r := restoreTiny(t, cfg, s)
		if !bytes.Equal(all(t, r), want) {
			t.Fatalf("generation %d: restored memory differs", generation)
		}
		return r, s, saved.DataPages
	}
	few := func(what string, pages uint64) {
		t.Helper()
		if pages >= lumpPages/2 {
			t.Errorf("%s: %d pages stored", what, pages)
		}
	}

	m := bootTiny(t, cfg)
	counts(t, m, 0)
	if err := m.Pause(); err != nil {
		t.Fatal(err)
	}
	m.fillLump(t, 1)
	m.discard(t, lumpAddr, lumpBytes)
	m.lumpHolds(t, 0)
	_, _, pages := next(m, "")
	few("given back after a cold boot", pages)

	m.fillLump(t, 1)
	m, full, _ := next(m, "") // 1 is in the base
	m.fillLump(t, 2)
	m.discard(t, lumpAddr, lumpBytes)
	m.lumpHolds(t, 1)
	m, _, pages = next(m, full.base)
	few("given back to the base", pages)

	m.fillLump(t, 3)
	m, _, _ = next(m, full.base) // 3 is in a diff, and mapped from there
	if len(m.ram.inherited) == 0 {
		t.Fatal("the diff was not mapped: the test does not test that")
	}
	const short = mapBytes - snapshot.PageSize // not worth a mapping
	m.discard(t, lumpAddr, short)
	m.lumpHolds(t, 3)
	m.fillLump(t, 4)
	for at := guestmem.Addr(0); at < lumpBytes; at += snapshot.PageSize {
		m.discard(t, lumpAddr+at, snapshot.PageSize)
	}
	m.lumpHolds(t, 3)
	m, _, _ = next(m, full.base)
	m.lumpHolds(t, 3)
	m.fillLump(t, 4)
	m.discard(t, lumpAddr, lumpBytes) // and here it is: what the diff held is nobody's any more
	m.lumpHolds(t, 1)
	m, _, pages = next(m, full.base)
	few("given back to the base through a diff", pages)

	m.fillLump(t, 0)
	m, _, _ = next(m, full.base) // a zero run in a diff
	m.fillLump(t, 5)
	for at := guestmem.Addr(0); at < lumpBytes; at += short {
		m.discard(t, lumpAddr+at, min(short, lumpBytes-uint64(at)))
	}
	m.lumpHolds(t, 0)
	m, _, pages = next(m, full.base)
	few("given back to a zero run", pages)
	m.fillLump(t, 5)
	m.discard(t, lumpAddr, lumpBytes)
	m.lumpHolds(t, 1)
	m, _, pages = next(m, full.base)
	few("given back to the base through a zero run", pages)

	for page := guestmem.Addr(0); page < lumpPages; page += 2 { // short runs, which are copied in and not mapped
		m.poke(t, lumpAddr+page*snapshot.PageSize, 6)
		if err := m.ram.mem.WriteAt([]byte{1}, lumpAddr+(page+1)*snapshot.PageSize); err != nil {
			t.Fatal(err)
		}
	}
	m, _, _ = next(m, full.base)
	m.discard(t, lumpAddr, lumpBytes)
	m, _, _ = next(m, full.base)
	_, _, _ = next(m, "") // and as a new base
}

// What is inherited from a diff stays known exactly, however pieces are cut out of it, and there is an end to the cutting.
func TestDiscardOfInheritedMemory(t *testing.T) {
	const chunk = mapBytes / snapshot.PageSize
	cfg := testConfig(1, 4096*mib) // two regions
	m := bootTiny(t, cfg)
	full, _ := save(t, m, "")
	r := restoreTiny(t, cfg, full)
	hole := uint64(x86.HoleAddr / snapshot.PageSize)
	all := []pageRange{{100, 10 * chunk}, {3000, chunk}, {hole - 2*chunk, 2 * chunk}, {hole, 2 * chunk}}
	page := func(n uint64) guestmem.Addr {
		if n >= hole {
			return x86.HoleEnd + guestmem.Addr((n-hole)*snapshot.PageSize)
		}
		return guestmem.Addr(n * snapshot.PageSize)
	}
	for _, c := range []struct {
		name  string
		at    guestmem.Addr
		bytes uint64
		want  []pageRange
	}{
		{"elsewhere", page(2000), 900 * snapshot.PageSize, all},
		{"just before", page(99 - chunk), (chunk + 1) * snapshot.PageSize, all},
		{"too little", page(100), mapBytes - 1, all},
		{"too little of it", page(100 - chunk), (2*chunk - 1) * snapshot.PageSize, all},
		{"a run", page(3000), mapBytes, []pageRange{all[0], all[2], all[3]}},
		{"the beginning", page(90), (10 + chunk) * snapshot.PageSize, append([]pageRange{{100 + chunk, 9 * chunk}}, all[1:]...)},
		{"the end", page(100 + 9*chunk), 500 * snapshot.PageSize, append([]pageRange{{100, 9 * chunk}}, all[1:]...)},
		{"the middle, not on pages", page(100+chunk) - 5, mapBytes + 10, append([]pageRange{{100, chunk}, {100 + 2*chunk, 8 * chunk}}, all[1:]...)},
		{"across the hole", page(hole - chunk), x86.HoleEnd - x86.HoleAddr + 2*mapBytes, []pageRange{all[0], all[1], {hole - 2*chunk, chunk}, {hole + chunk, chunk}}},
		{"everything", 0, 1<<64 - 1, nil},
	} {
		r.ram.inherited, r.ram.rebased = slices.Clone(all), 0
		if _, err := r.ram.Discard(c.at, c.bytes); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(r.ram.inherited, c.want) {
			t.Errorf("%s: inherited %v, want %v", c.name, r.ram.inherited, c.want)
		}
	}
	r.ram.inherited, r.ram.rebased = slices.Clone(all), maxRebased-1
	for range 3 {
		if _, err := r.ram.Discard(0, 1<<32); err != nil {
			t.Fatal(err)
		}
	}
	if want := all[1:]; !slices.Equal(r.ram.inherited, want) {
		t.Errorf("past the limit: inherited %v, want %v", r.ram.inherited, want)
	}
}

func TestDiscardGivesMemoryToTheHost(t *testing.T) {
	m := bootTiny(t, testConfig(1, 128*mib))
	m.fillLump(t, 1)
	before := m.Status().ResidentBytes
	m.discard(t, lumpAddr, lumpBytes)
	if after := m.Status().ResidentBytes; after+lumpBytes/2 > before {
		t.Errorf("%d bytes resident after %d were given back, %d before", after, lumpBytes, before)
	}
	counts(t, m, m.peek(t, tinyCounter))
}

func balloonConfig() Config {
	cfg := testConfig(1, 128*mib)
	cfg.Balloon = &Balloon{Reporting: true}
	return cfg
}

func TestBalloonOperations(t *testing.T) {
	plain := bootTiny(t, testConfig(1, 128*mib))
	if err := plain.SetBalloon(0); !errors.Is(err, ErrNoBalloon) {
		t.Errorf("set without a balloon: %v", err)
	}
	if _, err := plain.BalloonStats(t.Context()); !errors.Is(err, ErrNoBalloon) {
		t.Errorf("statistics without a balloon: %v", err)
	}
	if s := plain.Status(); s.Balloon != nil {
		t.Errorf("status of no balloon: %+v", s.Balloon)
	}

	m := bootTiny(t, balloonConfig())
	if err := m.SetBalloon(128*mib + 1); !errors.Is(err, ErrConfig) {
		t.Errorf("a balloon larger than memory: %v", err)
	}
	if err := m.SetBalloon(64 * mib); err != nil {
		t.Fatal(err)
	}
	if _, err := m.BalloonStats(context.Background()); !errors.Is(err, virtio.ErrNoStatistics) {
		t.Errorf("statistics of a guest without a driver: %v", err)
	}
	full, _ := save(t, m, "")
	r := restoreTiny(t, balloonConfig(), full)
	for _, m := range []*Machine{m, r} {
		if s := m.Status(); s.Balloon == nil || s.Balloon.Actual != 0 {
			t.Errorf("status %+v", s)
		}
	}
	for name, cfg := range map[string]Config{"without": testConfig(1, 128*mib)} {
		if _, _, err := Restore(cfg, full.open(t), true, zerolog.Nop()); !errors.Is(err, snapshot.ErrMismatch) {
			t.Errorf("restored %s a balloon: %v", name, err)
		}
	}
	bare, _ := save(t, plain, "")
	if _, _, err := Restore(balloonConfig(), bare.open(t), true, zerolog.Nop()); !errors.Is(err, snapshot.ErrMismatch) {
		t.Errorf("restored with a balloon what was saved without: %v", err)
	}
	if err := r.Resume(); err != nil {
		t.Fatal(err)
	}
	r.poke(t, tinyCommand, tinyReset)
	<-r.Done()
	if err := r.SetBalloon(0); !errors.Is(err, ErrEnded) {
		t.Errorf("set after the end: %v", err)
	}
	if _, err := r.BalloonStats(t.Context()); !errors.Is(err, ErrEnded) {
		t.Errorf("statistics after the end: %v", err)
	}
}
