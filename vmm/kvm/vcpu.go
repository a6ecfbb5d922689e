package kvm

import (
	"errors"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// VCPU is one virtual CPU. Its methods are called from one thread at a time, by preference always the same (changing threads
// costs the kernel an RCU grace period); SetImmediateExit alone may be called from anywhere.
type VCPU struct {
	fd   int
	page []byte // kvm_run and the I/O data behind it

	words    []Word
	answered atomic.Uint64
}

// Close unmaps kvm_run and closes the descriptor. The vCPU must be outside Run.
func (v *VCPU) Close() error {
	err := os.NewSyscallError("munmap kvm_run", unix.Munmap(v.page))
	return errors.Join(err, closeFD(v.fd))
}

// Run issues KVM_RUN until there is an exit that it does not answer itself (SetWords). EINTR (a signal came, or immediate exit
// is set) and EAGAIN are returned, not retried.
// Preconditions: the caller is locked to its thread.
func (v *VCPU) Run() error {
	if errno := v.enter(); errno != 0 {
		return os.NewSyscallError(run.String(), errno)
	}
	return nil
}

// Regs issues KVM_GET_REGS.
func (v *VCPU) Regs() (r Regs, err error) {
	_, err = ioctlPtr(v.fd, getRegs, &r)
	return r, err
}

// SetRegs issues KVM_SET_REGS.
func (v *VCPU) SetRegs(r *Regs) error {
	_, err := ioctlPtr(v.fd, setRegs, r)
	return err
}

// Sregs issues KVM_GET_SREGS.
func (v *VCPU) Sregs() (s Sregs, err error) {
	_, err = ioctlPtr(v.fd, getSregs, &s)
	return s, err
}

// SetSregs issues KVM_SET_SREGS.
func (v *VCPU) SetSregs(s *Sregs) error {
	_, err := ioctlPtr(v.fd, setSregs, s)
	return err
}

// LAPIC issues KVM_GET_LAPIC.
func (v *VCPU) LAPIC() (l LAPIC, err error) {
	_, err = ioctlPtr(v.fd, getLAPIC, &l)
	return l, err
}

// SetLAPIC issues KVM_SET_LAPIC.
func (v *VCPU) SetLAPIC(l *LAPIC) error {
	_, err := ioctlPtr(v.fd, setLAPIC, l)
	return err
}

// MPState issues KVM_GET_MP_STATE. Reading it makes KVM act on INIT and SIPI that are pending.
func (v *VCPU) MPState() (s uint32, err error) {
	_, err = ioctlPtr(v.fd, getMPState, &s)
	return s, err
}

// SetMPState issues KVM_SET_MP_STATE.
func (v *VCPU) SetMPState(s uint32) error {
	_, err := ioctlPtr(v.fd, setMPState, &s)
	return err
}

// Events issues KVM_GET_VCPU_EVENTS.
func (v *VCPU) Events() (e VCPUEvents, err error) {
	_, err = ioctlPtr(v.fd, getVCPUEvents, &e)
	return e, err
}

// SetEvents issues KVM_SET_VCPU_EVENTS.
func (v *VCPU) SetEvents(e *VCPUEvents) error {
	_, err := ioctlPtr(v.fd, setVCPUEvents, e)
	return err
}

// DebugRegs issues KVM_GET_DEBUGREGS.
func (v *VCPU) DebugRegs() (d DebugRegs, err error) {
	_, err = ioctlPtr(v.fd, getDebugRegs, &d)
	return d, err
}

// SetDebugRegs issues KVM_SET_DEBUGREGS.
func (v *VCPU) SetDebugRegs(d *DebugRegs) error {
	_, err := ioctlPtr(v.fd, setDebugRegs, d)
	return err
}

// XCRs issues KVM_GET_XCRS.
func (v *VCPU) XCRs() (x XCRs, err error) {
	_, err = ioctlPtr(v.fd, getXCRs, &x)
	return x, err
}

// SetXCRs issues KVM_SET_XCRS.
func (v *VCPU) SetXCRs(x *XCRs) error {
	_, err := ioctlPtr(v.fd, setXCRs, x)
	return err
}

// TSCKHz issues KVM_GET_TSC_KHZ: the guest's TSC frequency.
func (v *VCPU) TSCKHz() (uint32, error) {
	n, err := ioctlInt(v.fd, getTSCKHz, 0)
	return uint32(n), err
}

// SetTSCKHz issues KVM_SET_TSC_KHZ; it needs CapTSCControl unless the host's frequency is near enough.
func (v *VCPU) SetTSCKHz(khz uint32) error {
	_, err := ioctlInt(v.fd, setTSCKHz, uintptr(khz))
	return err
}

// KVMClockCtrl issues KVM_KVMCLOCK_CTRL: tells the guest it was paused, so that its watchdogs keep quiet. EINVAL means that
// the guest has no kvmclock (yet).
func (v *VCPU) KVMClockCtrl() error {
	_, err := ioctlInt(v.fd, kvmclockCtrl, 0)
	return err
}

// CPUID issues KVM_GET_CPUID2.
func (v *VCPU) CPUID() ([]CPUIDEntry, error) {
	t := &cpuidTable{n: maxCPUID}
	if _, err := ioctlPtr(v.fd, getCPUID2, t); err != nil {
		return nil, err
	}
	// Older kernels (6.1 among them) fill the table but leave the count as it was: the rest of it is still zero.
	n := min(t.n, maxCPUID)
	for n > 0 && t.entries[n-1] == (CPUIDEntry{}) {
		n--
	}
	return t.entries[:n], nil
}

// SetCPUID issues KVM_SET_CPUID2. Before the first Run, and before MSRs.
func (v *VCPU) SetCPUID(entries []CPUIDEntry) error {
	if len(entries) > maxCPUID {
		return &os.SyscallError{Syscall: setCPUID2.String(), Err: unix.E2BIG}
	}
	t := &cpuidTable{n: uint32(len(entries))}
	copy(t.entries[:], entries)
	_, err := ioctlPtr(v.fd, setCPUID2, t)
	return err
}

// MSRs issues KVM_GET_MSRS for up to MaxMSRs indices and returns those read: the kernel stops at the first index it cannot
// read, so a result shorter than indices names it.
func (v *VCPU) MSRs(indices []uint32) ([]MSR, error) {
	t := new(msrTable)
	for i, index := range indices[:min(len(indices), MaxMSRs)] {
		t.entries[i].Index = index
		t.n++
	}
	n, err := ioctlPtr(v.fd, getMSRs, t)
	if err != nil {
		return nil, err
	}
	return t.entries[:min(n, uintptr(t.n))], nil
}

// SetMSRs issues KVM_SET_MSRS for up to MaxMSRs values and returns how many were set: the kernel stops at the first it refuses.
func (v *VCPU) SetMSRs(msrs []MSR) (int, error) {
	t := new(msrTable)
	t.n = uint32(copy(t.entries[:], msrs))
	n, err := ioctlPtr(v.fd, setMSRs, t)
	return int(n), err
}
