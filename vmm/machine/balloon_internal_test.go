package machine

import (
	"bytes"
	"context"
	"errors"
	"testing"

	"github.com/rs/zerolog"

	"torpor/vmm/guestmem"
	"torpor/vmm/snapshot"
	"torpor/vmm/virtio"
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
	got, err := m.ram.mem.Discard(a, n)
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
// have: anonymous (zeros), of the base (its bytes), of a diff (the diff's bytes), anonymous over a zero run (zeros). And it
// costs nothing where that is what lies below.
func TestDiscardedMemoryIsSavedAsTheGuestSeesIt(t *testing.T) {
	cfg := testConfig(1, 128*mib)
	generation := 0
	// next saves m and restores that, and checks that nothing has changed. It returns how many pages were stored.
	next := func(m *Machine, base string) (*Machine, Snapshot, uint64) {
		t.Helper()
		generation++
		want := memory(t, m)
		s, saved := save(t, m, base)
		verify(t, s)
		r := restoreTiny(t, cfg, s)
		if !bytes.Equal(memory(t, r), want) {
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
	m, _, pages = next(m, full.Base)
	few("given back to the base", pages)

	m.fillLump(t, 3)
	m, _, _ = next(m, full.Base) // 3 is in a diff, and mapped from there
	if len(m.ram.inherited) == 0 {
		t.Fatal("the diff was not mapped: the test does not test that")
	}
	m.discard(t, lumpAddr, lumpBytes/2)
	m.lumpHolds(t, 3)
	m.fillLump(t, 4)
	m.discard(t, lumpAddr, lumpBytes)
	m.lumpHolds(t, 3)
	m, _, _ = next(m, full.Base)
	m.lumpHolds(t, 3)

	m.fillLump(t, 0)
	m, _, _ = next(m, full.Base) // a zero run in a diff
	m.fillLump(t, 5)
	m.discard(t, lumpAddr, lumpBytes)
	m.lumpHolds(t, 0)
	m, _, pages = next(m, full.Base)
	few("given back to a zero run", pages)

	for page := guestmem.Addr(0); page < lumpPages; page += 2 { // short runs, which are copied in and not mapped
		m.poke(t, lumpAddr+page*snapshot.PageSize, 6)
		if err := m.ram.mem.WriteAt([]byte{1}, lumpAddr+(page+1)*snapshot.PageSize); err != nil {
			t.Fatal(err)
		}
	}
	m, _, _ = next(m, full.Base)
	m.discard(t, lumpAddr, lumpBytes)
	m, _, _ = next(m, full.Base)
	_, _, _ = next(m, "") // and as a new base
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
		if _, _, err := Restore(cfg, full, true, zerolog.Nop()); !errors.Is(err, snapshot.ErrMismatch) {
			t.Errorf("restored %s a balloon: %v", name, err)
		}
	}
	bare, _ := save(t, plain, "")
	if _, _, err := Restore(balloonConfig(), bare, true, zerolog.Nop()); !errors.Is(err, snapshot.ErrMismatch) {
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
