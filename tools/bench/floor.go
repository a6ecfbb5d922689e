package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"torpor/vmm/kvm"
	"torpor/vmm/snapshot"
	"torpor/vmm/x86"
)

// bare is a saved machine as KVM takes it, with nothing left to decode.
type bare struct {
	memory *os.File
	clock  uint64
	chips  []kvm.IRQChip
	cpuid  []kvm.CPUIDEntry
	mp     uint32
	regs   kvm.Regs
	sregs  kvm.Sregs
	xsave  []byte
	xcrs   kvm.XCRs
	debug  kvm.DebugRegs
	lapic  kvm.LAPIC
	events kvm.VCPUEvents
	msrs   []kvm.MSR
	size   uint64
}

func newBare(state, memory string) (*bare, error) {
	s, err := snapshot.ReadState(state)
	if err != nil {
		return nil, err
	}
	v := s.VCPUs[0]
	b := &bare{clock: s.Clock, mp: v.MPState, xsave: v.XSave, size: s.Shape.MemoryBytes}
	b.cpuid = make([]kvm.CPUIDEntry, len(v.CPUID)/binary.Size(kvm.CPUIDEntry{}))
	var errs []error
	load := func(from []byte, to any) {
		_, err := binary.Decode(from, binary.LittleEndian, to)
		errs = append(errs, err)
	}
	load(v.Regs, &b.regs)
	load(v.Sregs, &b.sregs)
	load(v.XCRs, &b.xcrs)
	load(v.DebugRegs, &b.debug)
	load(v.LAPIC, &b.lapic)
	load(v.Events, &b.events)
	load(v.CPUID, b.cpuid)
	for id, raw := range s.IRQChips {
		var c kvm.IRQChip
		load(raw, &c)
		c.ID = uint32(id)
		b.chips = append(b.chips, c)
	}
	for _, m := range v.MSRs {
		b.msrs = append(b.msrs, kvm.MSR{Index: m.Index, Data: m.Data})
	}
	if b.memory, err = os.Open(memory); err != nil {
		errs = append(errs, err)
	}
	return b, errors.Join(errs...)
}

// resume does what cannot be left out: the ioctls and the mapping of memory, in a loop of its own, up to the guest's first exit.
func (b *bare) resume(sys *kvm.System) (_ time.Duration, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	began := time.Now()
	memory, err := unix.Mmap(int(b.memory.Fd()), 0, int(b.size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_NORESERVE)
	if err != nil {
		return 0, os.NewSyscallError("mmap", err)
	}
	defer func() { err = errors.Join(err, unix.Munmap(memory)) }()
	vm, err := sys.CreateVM()
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, vm.Close()) }()
	if err := errors.Join(vm.SetTSSAddr(x86.TSSAddr), vm.SetIdentityMapAddr(x86.IdentityAddr), vm.CreateIRQChip()); err != nil {
		return 0, err
	}
	if err := vm.SetMemoryRegion(0, 0, memory); err != nil {
		return 0, err
	}
	c, err := vm.CreateVCPU(0)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	for _, step := range []func() error{
		func() error { return c.SetCPUID(b.cpuid) },
		func() error { return c.SetMPState(b.mp) },
		func() error { return c.SetRegs(&b.regs) },
		func() error { return c.SetSregs(&b.sregs) },
		func() error { return c.SetXSave(b.xsave) },
		func() error { return c.SetXCRs(&b.xcrs) },
		func() error { return c.SetDebugRegs(&b.debug) },
		func() error { return c.SetLAPIC(&b.lapic) },
		func() error { _, err := c.SetMSRs(b.msrs); return err }, // how far it came: some MSRs can be read and not written
		func() error { return c.SetEvents(&b.events) },
	} {
		if err := step(); err != nil {
			return 0, err
		}
	}
	for i := range b.chips {
		if err := vm.SetIRQChip(&b.chips[i]); err != nil {
			return 0, err
		}
	}
	if err := vm.SetClock(b.clock); err != nil {
		return 0, err
	}
	for {
		err := c.Run()
		if err != nil && !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EAGAIN) {
			return 0, err
		}
		if err == nil && c.Exit() == kvm.ExitIO {
			return time.Since(began), nil
		}
		if err == nil && c.Exit() != kvm.ExitIntr {
			return 0, fmt.Errorf("the guest made exit %d", c.Exit())
		}
	}
}
