package machine

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"torpor/vmm/cow"
)

var boots = flag.Int("boots", 1000, "machines to make and kill in the leak test; -test.short divides by 10")

// holdings is what a process holds that a machine could leave behind.
type holdings struct {
	fds, threads, mounts, goroutines int
	anonKiB                          uint64 // resident memory that no file backs
}

func holds(t *testing.T) (h holdings) {
	t.Helper()
	debug.FreeOSMemory() // runs the collector, too
	entries := func(dir string) int {
		list, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	h.fds, h.threads, h.goroutines = entries("/proc/self/fd"), entries("/proc/self/task"), runtime.NumGoroutine()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	h.mounts = bytes.Count(mounts, []byte("\n"))
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(status) {
		if _, err := fmt.Sscanf(string(line), "RssAnon: %d kB", &h.anonKiB); err == nil {
			return h
		}
	}
	t.Fatal("no RssAnon in /proc/self/status")
	return h
}

// A machine leaves nothing behind, however it ends (kata#9774, #6232, #12747 were leaks of this kind). The guest has all devices and
// is killed while it runs, while it is paused, and after it ended by itself.
func TestBootsAndKillsLeaveNothing(t *testing.T) {
	needKVM(t)
	dir, kernel := t.TempDir(), kernelOf(t, tinyCode)
	top := filepath.Join(dir, "top")
	if err := cow.Create(top, 64*mib); err != nil {
		t.Fatal(err)
	}
	cycle := func(i int) {
		socket := filepath.Join(dir, "vsock")
		cfg := Config{
			Host: testHost(), VCPUs: 2, MemoryBytes: 128 * mib,
			Disks:   []Disk{{ID: "root", Top: openFile(t, top, os.O_RDWR)}},
			Vsock:   &Vsock{CID: 3, Listener: listenVsock(t, socket)},
			Console: &Console{Log: openFile(t, filepath.Join(dir, "console"), os.O_CREATE|os.O_RDWR)},
			Balloon: &Balloon{Reporting: true},
		}
		defer os.Remove(socket)
		m, err := Boot(cfg, Kernel{Image: openFile(t, kernel, os.O_RDONLY)}, zerolog.Nop())
		if err != nil {
			t.Fatalf("boot %d: %v", i, err)
		}
		counts(t, m, 0)
		switch i % 3 {
		case 0: // killed while it runs
		case 1:
			if err := m.Pause(); err != nil {
				t.Fatal(err)
			}
		case 2:
			m.poke(t, tinyCommand, tinyPowerOff)
			<-m.Done()
		}
		closeMachine(t, m)
	}
	n := *boots
	if testing.Short() {
		n /= 10
	}
	const warmUp = 30 // the heap, the pools and the runtime's threads find their size
	for i := range warmUp {
		cycle(i)
	}
	before, start := holds(t), time.Now()
	for i := range n {
		cycle(i)
	}
	took := time.Since(start)
	var after holdings
	eventually(t, "threads that have ended are gone", func() bool {
		after = holds(t)
		return after.threads <= before.threads+2 && after.goroutines <= before.goroutines
	})
	t.Logf("%d boots and kills in %v: before %+v, after %+v", n, took.Round(time.Millisecond), before, after)
	if after.fds != before.fds || after.mounts != before.mounts {
		t.Errorf("before %+v, after %+v", before, after)
	}
	// Two pages a boot would be a leak; the rest is for the heap's own ups and downs, which large pages make 2 MiB each. The race
	// detector keeps some 8 KiB for the threads and goroutines of each boot.
	allowance := uint64(8 << 10)
	if raceDetector {
		allowance *= 3
	}
	if after.anonKiB > before.anonKiB+allowance {
		t.Errorf("%d KiB more are resident after %d boots", after.anonKiB-before.anonKiB, n)
	}
}
