package machine

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"torpor/vmm/guestmem"
	"torpor/vmm/snapshot"
)

// A base that is cut short under its machines (it killed a whole node of E2B's, infra#3385) ends the one whose guest needs a page
// that is gone, with a reason of its own; the process and every machine on another base live.
func TestTruncatedBaseEndsItsMachineAlone(t *testing.T) {
	cfg := testConfig(2, 128*mib)
	m := bootTiny(t, cfg)
	counts(t, m, 0)
	full, _ := save(t, m, "")
	if err := m.Resume(); err != nil { // the other machine, in the same process
		t.Fatal(err)
	}
	r := restoreTiny(t, cfg, full)
	if err := os.Truncate(full.base, 4096); err != nil {
		t.Fatal(err)
	}

	// What the host does for the guest fails alone.
	if _, err := r.ram.mem.ReadUint64(tinyCounter); !errors.Is(err, guestmem.ErrFault) {
		t.Errorf("read of a lost page: %v", err)
	}
	dir := t.TempDir()
	if _, err := saveTo(t, r, SaveCumulative, filepath.Join(dir, "state"), filepath.Join(dir, "mem")); err != nil && !errors.As(err, new(*snapshot.Error)) {
		t.Errorf("save: %v", err)
	}

	if err := r.Resume(); err != nil {
		t.Fatal(err)
	}
	<-r.Done()
	want := ReasonMemory
	if _, err := os.Stat("/sys/module/kvm_pvm"); err == nil {
		want = ReasonReset // it emulates the guest's supervisor, and gives it a page fault where it cannot fetch: a triple fault
	}
	if end := r.End(); end.Reason != want {
		t.Errorf("ended by %+v, want %s", end, want)
	}
	counts(t, m, m.peek(t, tinyCounter))
}
