package machine

import (
	"encoding/binary"
	"path/filepath"
	"testing"
	"time"

	"torpor/vmm/guestmem"
)

// dirtyMachine is a running machine restored from its own base, in which n bytes from dirtyFrom on were written since, each page
// with something else.
func dirtyMachine(t *testing.T, memory, n uint64) (*Machine, savedFiles) {
	t.Helper()
	cfg := testConfig(1, memory)
	m := bootTiny(t, cfg)
	counts(t, m, 0)
	full, _, _ := checkpoint(t, m, "")
	r := restoreTiny(t, cfg, full)
	if err := r.Resume(); err != nil {
		t.Fatal(err)
	}
	dirty(t, r, n, 1)
	return r, full
}

const dirtyFrom = guestmem.Addr(256 * mib)

func dirty(t *testing.T, m *Machine, n uint64, seed uint64) {
	t.Helper()
	b := make([]byte, mib)
	for at := dirtyFrom; at < dirtyFrom+n; at += mib {
		for i := 0; i < len(b); i += 8 {
			seed = seed*6364136223846793005 + 1442695040888963407
			binary.LittleEndian.PutUint64(b[i:], seed)
		}
		m.poke(t, at, b...)
	}
}

// stops returns how long a machine with n dirty bytes stands still for a checkpoint and for a pause that is saved.
func stops(t *testing.T, memory, n uint64) (forCheckpoint, forPause time.Duration) {
	t.Helper()
	m, full := dirtyMachine(t, memory, n)
	for round := range 3 { // the least of three: it is processor time, and others want the processors, too
		_, saved, stopped := checkpoint(t, m, full.base)
		if saved.DataPages < n/4096 {
			t.Errorf("saved %+v", saved)
		}
		if round == 0 || stopped < forCheckpoint {
			forCheckpoint = stopped
		}
	}
	dir := t.TempDir()
	begin := time.Now()
	if err := m.Pause(); err != nil {
		t.Fatal(err)
	}
	if _, err := saveTo(t, m, SaveCumulative, filepath.Join(dir, "state"), filepath.Join(dir, "mem")); err != nil {
		t.Fatal(err)
	}
	return forCheckpoint, time.Since(begin)
}

// The stop does not grow with what is to be written as a pause does. What is asserted is half of what is wanted, a tenth, since
// other tests run beside this one.
func TestCheckpointStopsForAFractionOfAPause(t *testing.T) {
	dirty := uint64(rounds(4)) * 256 * mib
	if raceDetector {
		dirty = 256 * mib // filling it is what takes long then
	}
	checkpoint, pause := stops(t, dirty+512*mib, dirty)
	t.Logf("%d MiB dirty: stood still for %v, a pause takes %v: 1/%.0f", dirty/mib, checkpoint, pause, pause.Seconds()/checkpoint.Seconds())
	if checkpoint > pause/5 && !raceDetector { // whose bookkeeping is what the stop then consists of
		t.Error("a checkpoint stops for too much of what a pause takes")
	}
}
