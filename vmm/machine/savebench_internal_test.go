package machine

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"torpor/vmm/snapshot"
)

var (
	benchSave   = flag.Uint64("bench-save", 0, "how many `MiB` are dirty when saving is measured beside dd (make bench-save); 0 leaves it out")
	benchRounds = flag.Int("bench-rounds", 5, "how often")
)

// Saving is as fast as the disk, nearly: beside what dd with an fsync writes to the same disk in the same minute, in turns.
func TestSaveKeepsUpWithTheDisk(t *testing.T) {
	if *benchSave == 0 {
		t.Skip("make bench-save measures it")
	}
	dirty := *benchSave * mib
	m, _ := dirtyMachine(t, dirty+512*mib, dirty)
	if err := m.Pause(); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	var saves, dds, pauses, ratios []float64
	rate := func(d time.Duration) float64 { return float64(*benchSave) / d.Seconds() }
	for range *benchRounds {
		file := filepath.Join(dir, "dd")
		begin := time.Now()
		out, err := exec.Command("dd", "if=/dev/zero", "of="+file, "bs=1M", fmt.Sprintf("count=%d", *benchSave), "conv=fsync").CombinedOutput()
		if err != nil {
			t.Fatalf("dd: %v\n%s", err, out)
		}
		dds = append(dds, rate(time.Since(begin)))

		begin = time.Now()
		if _, err := m.ram.planLayer(SaveDiff, m.host.pagemap); err != nil {
			t.Fatal(err)
		}
		pauses = append(pauses, float64(time.Since(begin).Microseconds())/1000)

		state, memory := filepath.Join(dir, "state"), filepath.Join(dir, "mem")
		begin = time.Now()
		saved, err := saveTo(t, m, SaveDiff, state, memory)
		if err != nil {
			t.Fatal(err)
		}
		saves = append(saves, rate(time.Since(begin)))
		if saved.DataPages < dirty/snapshot.PageSize {
			t.Fatalf("saved %+v", saved)
		}
		for _, path := range []string{file, state, memory} {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		}
	}
	for i := range saves {
		ratios = append(ratios, saves[i]/dds[i])
	}
	median := func(v []float64) float64 { return slices.Sorted(slices.Values(v))[len(v)/2] }
	t.Logf("%d MiB dirty, %d rounds, medians: save %.0f MiB/s, dd with fsync %.0f MiB/s, ratio %.2f; finding the dirty pages takes %.1f ms of a save",
		*benchSave, *benchRounds, median(saves), median(dds), median(ratios), median(pauses))
	if median(ratios) < 0.7 {
		t.Errorf("a save is %.2f times as fast as dd, at least 0.7 is wanted", median(ratios))
	}
}
