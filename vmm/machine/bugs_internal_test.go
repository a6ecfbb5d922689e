package machine

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"torpor/vmm/kvm"
	"torpor/vmm/x86"
)

func TestRunRetriesWhatIsSpurious(t *testing.T) {
	for _, c := range []struct {
		err  error
		time int
		want bool
	}{
		{unix.EAGAIN, 1, true},
		{unix.ENOMEM, 1, true},
		{os.NewSyscallError("KVM_RUN", unix.ENOMEM), maxAgain, true},
		{unix.EAGAIN, maxAgain + 1, false},
		{unix.EFAULT, 1, false},
		{unix.EINVAL, 1, false},
		{errors.New("other"), 1, false},
	} {
		if got := worthAnother(c.err, c.time); got != c.want {
			t.Errorf("%v for the %dth time: %v", c.err, c.time, got)
		}
	}
}

func TestPagemapEntries(t *testing.T) {
	const exclusive, softDirty, frame = 1 << 56, 1 << 55, 0x1234
	for name, c := range map[string]struct {
		entry uint64
		want  bool
	}{
		"never touched":         {0, false},
		"read from the file":    {pagemapPresent | pagemapFile, false},
		"written":               {pagemapPresent, true},
		"written and swapped":   {pagemapSwapped | frame, true},
		"shared memory, in use": {pagemapPresent | pagemapFile | exclusive | frame, false},
		"shared memory on swap": {pagemapSwapped | pagemapFile, false},
		"soft-dirty, long gone": {softDirty, false},
		"the file's, locked":    {pagemapPresent | pagemapFile | softDirty, false},
		"written, soft-dirty":   {pagemapPresent | softDirty | exclusive, true},
	} {
		if got := anonymous(c.entry); got != c.want {
			t.Errorf("%s (%#x): %v", name, c.entry, got)
		}
	}
}

// MSRs that this KVM does not know cost neither a snapshot nor a restore.
func TestUnknownMSRsAreSkipped(t *testing.T) {
	m := bootTiny(t, testConfig(1, 128*mib))
	if err := m.Pause(); err != nil {
		t.Fatal(err)
	}
	const none1, none2 = 0x12345678, 0x7fffffff
	c := m.vcpus[0]
	err := c.do(func() error {
		got, err := m.getMSRs(c, []uint32{none1, x86.MSRTSC, none2, none1})
		if err != nil || len(got) != 1 || got[0].Index != x86.MSRTSC {
			t.Errorf("read %v, %v", got, err)
		}
		const lstar = 0xc0000082
		if err := m.setMSRs(c, []kvm.MSR{{Index: none1, Data: 1}, {Index: lstar, Data: 0x1000}, {Index: none2}}); err != nil {
			return err
		}
		got, err = m.getMSRs(c, []uint32{lstar})
		if err == nil && (len(got) != 1 || got[0].Data != 0x1000) {
			t.Errorf("behind a refused one, written as %v", got)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// The TSCs of a restored machine's vCPUs go on together. A KVM without TSC offsets (PVM) says so, and cannot be helped.
func TestRestoredTSCsAgree(t *testing.T) {
	cfg := testConfig(4, 128*mib)
	m := bootTiny(t, cfg)
	counts(t, m, 0)
	full, _ := save(t, m, "")
	r := restoreTiny(t, cfg, full)
	var offsets []uint64
	for _, c := range r.vcpus {
		err := c.do(func() error {
			offset, err := c.kvm.TSCOffset()
			offsets = append(offsets, offset)
			return err
		})
		if err != nil {
			t.Logf("this KVM has no TSC offsets: %v", err)
			return
		}
	}
	if slices.Min(offsets) != slices.Max(offsets) {
		t.Errorf("TSC offsets %v", offsets)
	}
}

// Signals at any moment are nothing: to the calls that make a machine, to those that run it, stop it, save it and end it.
func TestSignalStorm(t *testing.T) {
	needKVM(t)
	stop := make(chan struct{})
	var storm sync.WaitGroup
	storm.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			threads, _ := os.ReadDir("/proc/self/task")
			for _, thread := range threads {
				var tid int
				if _, err := fmt.Sscan(thread.Name(), &tid); err == nil {
					_ = unix.Tgkill(unix.Getpid(), tid, unix.SIGURG)
				}
			}
			time.Sleep(100 * time.Microsecond) // 10,000 a second and thread is enough
		}
	})
	defer storm.Wait()
	defer close(stop)
	cfg := testConfig(2, 128*mib)
	for range rounds(8) {
		m := bootTiny(t, cfg)
		counts(t, m, 0)
		full, _ := save(t, m, "")
		r := restoreTiny(t, cfg, full)
		if err := r.Resume(); err != nil {
			t.Fatal(err)
		}
		counts(t, r, m.peek(t, tinyCounter))
		if s := r.Status(); s.State != Running {
			t.Fatalf("%+v", s)
		}
	}
}
