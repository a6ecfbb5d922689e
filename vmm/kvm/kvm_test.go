package kvm_test

import (
	"errors"
	"io/fs"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"torpor/vmm/kvm"
)

// newVCPU skips the test, with a reason, where there is no KVM. TORPOR_REQUIRE_KVM turns the skip into a failure.
func newVCPU(t *testing.T) *kvm.VCPU {
	t.Helper()
	sys, err := kvm.Open()
	if err != nil {
		if os.Getenv("TORPOR_REQUIRE_KVM") == "" && (errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission)) {
			t.Skipf("needs /dev/kvm: %v", err)
		}
		t.Fatal(err)
	}
	vm, err := sys.CreateVM()
	if err != nil {
		t.Fatal(err)
	}
	if err := vm.CreateIRQChip(); err != nil {
		t.Fatal(err)
	}
	v, err := vm.CreateVCPU(0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(v.Close(), vm.Close(), sys.Close()); err != nil {
			t.Error(err)
		}
	})
	return v
}

// The kernel's limit is one less than the constant in its source says, which a longer list than today's would have met first.
func TestMaxMSRsIsWhatTheKernelTakes(t *testing.T) {
	v := newVCPU(t)
	const tsc = 0x10
	indices := make([]uint32, kvm.MaxMSRs+10)
	for i := range indices {
		indices[i] = tsc
	}
	got, err := v.MSRs(indices)
	if err != nil || len(got) != kvm.MaxMSRs {
		t.Fatalf("read %d, %v", len(got), err)
	}
	n, err := v.SetMSRs(got)
	if err != nil || n != kvm.MaxMSRs {
		t.Errorf("set %d, %v", n, err)
	}
}

func TestErrorsNameTheIoctl(t *testing.T) {
	v := newVCPU(t)
	err := v.SetCPUID(make([]kvm.CPUIDEntry, 1000))
	var call *os.SyscallError
	if !errors.As(err, &call) || call.Syscall != "KVM_SET_CPUID2" || !errors.Is(err, unix.E2BIG) {
		t.Errorf("%v", err)
	}
	if err := v.SetMPState(99); !errors.As(err, &call) || call.Syscall != "KVM_SET_MP_STATE" || !errors.Is(err, unix.EINVAL) {
		t.Errorf("%v", err)
	}
}

// Registers come back as they were set: a field in the wrong place would not.
func TestRegistersRoundTrip(t *testing.T) {
	v := newVCPU(t)
	want := kvm.Regs{RAX: 1, RBX: 2, RCX: 3, RDX: 4, RSI: 5, RDI: 6, RSP: 7, RBP: 8, R8: 9, R9: 10, R10: 11, R11: 12, R12: 13, R13: 14, R14: 15, R15: 16, RIP: 17, RFlags: 2}
	if err := v.SetRegs(&want); err != nil {
		t.Fatal(err)
	}
	if got, err := v.Regs(); err != nil || got != want {
		t.Errorf("%+v, %v", got, err)
	}
	s, err := v.Sregs()
	if err != nil {
		t.Fatal(err)
	}
	s.GDT.Base, s.GDT.Limit, s.CR2, s.FS.Base = 0x500, 0x27, 0xdead000, 0x1234
	if err := v.SetSregs(&s); err != nil {
		t.Fatal(err)
	}
	if got, err := v.Sregs(); err != nil || got != s {
		t.Errorf("%+v, want %+v, %v", got, s, err)
	}
}
