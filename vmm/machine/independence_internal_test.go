package machine

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"torpor/vmm/guestmem"
)

// cost is what something took of the clock, and of the processors.
type cost struct{ clock, cpu time.Duration }

func measure(t *testing.T, f func()) cost {
	t.Helper()
	spent := func() time.Duration {
		var u unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
			t.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	began, before := time.Now(), spent()
	f()
	return cost{time.Since(began), spent() - before}
}

// What is paid for a pause and a wake is what was written, not what the machine has: the same set of dirty pages, some in a row and some
// scattered, in machines of three sizes, in turns. Processor time is compared, which does not depend on who else uses this machine and its
// disk; the bytes written have to be the same.
func TestPauseAndWakeDoNotGrowWithMemory(t *testing.T) {
	needKVM(t)
	if raceDetector {
		t.Skip("the race detector's own work would be measured")
	}
	rounds, most, dirtyMiB := 5, 1.3, 64
	if testing.Short() { // an emulated processor, whose time is rough
		rounds, most, dirtyMiB = 2, 2, 16
	}
	sizes := []uint64{256 * mib, gib, 4 * gib}
	bases := make([]savedFiles, len(sizes))
	for i, size := range sizes {
		m := bootTiny(t, testConfig(1, size))
		counts(t, m, 0)
		bases[i], _ = save(t, m, "")
	}
	pauses, wakes := make([][]cost, len(sizes)), make([][]cost, len(sizes))
	bytes := map[uint64]bool{}
	for range rounds {
		for i, size := range sizes {
			t.Run(fmt.Sprintf("%d MiB", size/mib), func(t *testing.T) {
				pause, wake, pages := costOfCycle(t, size, bases[i], dirtyMiB)
				pauses[i], wakes[i], bytes[pages] = append(pauses[i], pause), append(wakes[i], wake), true
			})
		}
	}
	if len(bytes) != 1 {
		t.Errorf("pages saved of the same dirty set: %v", bytes)
	}
	compare := func(what string, costs [][]cost) {
		var least []cost
		for i := range sizes {
			byCPU := slices.MinFunc(costs[i], func(a, b cost) int { return int(a.cpu - b.cpu) })
			byClock := slices.MinFunc(costs[i], func(a, b cost) int { return int(a.clock - b.clock) })
			least = append(least, cost{byClock.clock, byCPU.cpu})
			t.Logf("%s of %d MiB dirty in %d MiB: %v of processor time, %v (least of %d)", what, dirtyMiB, sizes[i]/mib, byCPU.cpu, byClock.clock, rounds)
		}
		byCPU := func(a, b cost) int { return int(a.cpu - b.cpu) }
		lo, hi := slices.MinFunc(least, byCPU), slices.MaxFunc(least, byCPU)
		if ratio := float64(hi.cpu) / float64(lo.cpu); ratio > most {
			t.Errorf("a %s costs %.2f times as much in one size of memory as in another, at most %.1f allowed", what, ratio, most)
		}
	}
	compare("pause", pauses)
	compare("wake", wakes)
}

// costOfCycle restores a machine, dirties so much of it, and measures saving that and restoring it again.
func costOfCycle(t *testing.T, size uint64, base savedFiles, dirtyMiB int) (pause, wake cost, pages uint64) {
	t.Helper()
	m := restoreTiny(t, testConfig(1, size), base)
	page := make([]byte, 4096)
	for i := range dirtyMiB * mib / len(page) {
		at := guestmem.Addr(0x4000000 + i*len(page)) // three quarters in rows of three
		if i%4 == 3 {
			at = guestmem.Addr(0x9000000 + i*len(page)) // a quarter with untouched ones between
		}
		copy(page, fmt.Sprintf("page %d", i))
		m.poke(t, at, page...)
	}
	var saved savedFiles
	var what Saved
	pause = measure(t, func() { saved, what = save(t, m, base.base) })
	wake = measure(t, func() { restoreTiny(t, testConfig(1, size), saved) })
	return pause, wake, what.DataPages
}
