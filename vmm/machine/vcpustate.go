package machine

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"torpor/vmm/kvm"
	"torpor/vmm/snapshot"
	"torpor/vmm/x86"
)

// pack returns the bytes of a kernel struct; unpack is its inverse.
func pack(v any) []byte {
	b, err := binary.Append(nil, binary.LittleEndian, v)
	if err != nil {
		panic(err) // v is not of fixed size: a mistake in this file
	}
	return b
}

func unpack(b []byte, v any) error {
	if binary.Size(v) != len(b) {
		return fmt.Errorf("%w: %d bytes for a %T", snapshot.ErrFormat, len(b), v)
	}
	_, err := binary.Decode(b, binary.LittleEndian, v)
	return err
}

// saveVCPU reads the whole state of a halted vCPU. The order matters: reading the MP state makes KVM act on start-up IPIs that
// are pending, and events are read last because the other reads can change them.
// Preconditions: on the vCPU's thread.
func (m *Machine) saveVCPU(c *vcpu, msrs []uint32, xsaveBytes int) (s snapshot.VCPU, err error) {
	var (
		regs   kvm.Regs
		sregs  kvm.Sregs
		xcrs   kvm.XCRs
		debug  kvm.DebugRegs
		lapic  kvm.LAPIC
		cpuid  []kvm.CPUIDEntry
		events kvm.VCPUEvents
	)
	for _, step := range []func() error{
		func() (err error) { s.MPState, err = c.kvm.MPState(); return },
		func() (err error) { regs, err = c.kvm.Regs(); s.Regs = pack(&regs); return },
		func() (err error) { sregs, err = c.kvm.Sregs(); s.Sregs = pack(&sregs); return },
		func() (err error) { s.XSave, err = c.kvm.XSave(xsaveBytes); return },
		func() (err error) { xcrs, err = c.kvm.XCRs(); s.XCRs = xcrs[:]; return },
		func() (err error) { debug, err = c.kvm.DebugRegs(); s.DebugRegs = debug[:]; return },
		func() (err error) { lapic, err = c.kvm.LAPIC(); s.LAPIC = lapic[:]; return },
		func() (err error) { s.TSCKHz, err = c.kvm.TSCKHz(); return },
		func() (err error) { cpuid, err = c.kvm.CPUID(); s.CPUID = pack(cpuid); return },
		func() (err error) { s.MSRs, err = m.getMSRs(c, msrs); return },
		func() (err error) { events, err = c.kvm.Events(); s.Events = events[:]; return },
	} {
		if err := step(); err != nil {
			return s, fmt.Errorf("save vCPU %d: %w", c.id, err)
		}
	}
	return s, nil
}

// tscTolerance is the difference of TSC frequencies that Linux's clock code absorbs: 250 parts per million.
const tscTolerance = 4000

// restoreVCPU writes the state of a vCPU that has not run, all but the MSRs in msrs that wait for restoreTSC. The order matters:
// CPUID decides which MSRs exist, and the APIC base in sregs comes before the APIC's registers.
// Preconditions: on the vCPU's thread.
func (m *Machine) restoreVCPU(c *vcpu, s *snapshot.VCPU, msrs []kvm.MSR) error {
	var (
		regs   kvm.Regs
		sregs  kvm.Sregs
		xcrs   kvm.XCRs
		debug  kvm.DebugRegs
		lapic  kvm.LAPIC
		events kvm.VCPUEvents
	)
	cpuid, err := unpackCPUID(s.CPUID)
	if err != nil {
		return err
	}
	for _, part := range []struct {
		to   any
		from []byte
	}{{&regs, s.Regs}, {&sregs, s.Sregs}, {&xcrs, s.XCRs}, {&debug, s.DebugRegs}, {&lapic, s.LAPIC}, {&events, s.Events}} {
		if err := unpack(part.from, part.to); err != nil {
			return &snapshot.Error{Part: fmt.Sprintf("state, section vcpu %d", c.id), Err: err}
		}
	}
	for _, step := range []func() error{
		func() error { return c.kvm.SetCPUID(cpuid) },
		func() error { return matchTSC(c, s.TSCKHz) },
		func() error { return c.kvm.SetMPState(s.MPState) },
		func() error { return c.kvm.SetRegs(&regs) },
		func() error { return c.kvm.SetSregs(&sregs) },
		func() error { return c.kvm.SetXSave(s.XSave) },
		func() error { return c.kvm.SetXCRs(&xcrs) },
		func() error { return c.kvm.SetDebugRegs(&debug) },
		func() error { return c.kvm.SetLAPIC(&lapic) },
		func() error { return m.setMSRs(c, msrs) },
		func() error { return c.kvm.SetEvents(&events) },
	} {
		if err := step(); err != nil {
			return fmt.Errorf("restore vCPU %d: %w", c.id, err)
		}
	}
	return nil
}

// matchTSC makes the guest's TSC tick as it did, where the host's differs by more than the guest could not notice.
func matchTSC(c *vcpu, khz uint32) error {
	now, err := c.kvm.TSCKHz()
	if err != nil {
		return err
	}
	diff := max(now, khz) - min(now, khz)
	if uint64(diff)*tscTolerance <= uint64(khz) {
		return nil
	}
	if err := c.kvm.SetTSCKHz(khz); err != nil {
		return fmt.Errorf("the snapshot's TSC runs at %d kHz, this host's at %d kHz, and it cannot scale: %w", khz, now, err)
	}
	return nil
}

func unpackCPUID(b []byte) ([]kvm.CPUIDEntry, error) {
	entries := make([]kvm.CPUIDEntry, len(b)/binary.Size(kvm.CPUIDEntry{}))
	if err := unpack(b, entries); err != nil {
		return nil, &snapshot.Error{Part: "state, CPUID table", Err: err}
	}
	return entries, nil
}

// restoreTSC makes the TSCs of all vCPUs go on from tsc, together. Writing the MSR alone does not do it: KVM takes a value
// within a second of what it expects for an attempt to synchronise and keeps its own, and vCPUs written one after the other
// stay apart, so that a guest that trusts its TSC would see time go backwards when a thread moves.
func (m *Machine) restoreTSC(tsc uint64) error {
	var offset uint64
	for i, c := range m.vcpus {
		err := c.do(func() error {
			if i > 0 {
				return c.kvm.SetTSCOffset(offset)
			}
			before, err := c.kvm.TSCOffset()
			if err != nil {
				return err
			}
			now, err := c.kvm.MSRs([]uint32{x86.MSRTSC})
			if err != nil || len(now) != 1 {
				return errors.Join(errors.New("the TSC cannot be read"), err)
			}
			offset = before + tsc - now[0].Data
			return c.kvm.SetTSCOffset(offset)
		})
		switch {
		case err == nil:
		case errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPERM):
			m.log.Warn().Err(err).Msg("this KVM has no TSC offset to set; the vCPUs' TSCs may differ by microseconds")
			return nil
		default:
			return fmt.Errorf("restore TSC of vCPU %d: %w", c.id, err)
		}
	}
	return nil
}

// restoreVCPUs writes the state of all vCPUs. The TSC deadline is compared with the TSC as it is written, so the TSCs are set
// between the other MSRs and the deadlines.
func (m *Machine) restoreVCPUs(states []snapshot.VCPU) error {
	var tsc uint64
	deadlines := make([][]kvm.MSR, len(m.vcpus))
	for i, c := range m.vcpus {
		msrs := make([]kvm.MSR, 0, len(states[i].MSRs))
		for _, r := range states[i].MSRs {
			msrs = append(msrs, kvm.MSR{Index: r.Index, Data: r.Data})
			if i == 0 && r.Index == x86.MSRTSC {
				tsc = r.Data
			}
		}
		var first []kvm.MSR
		first, deadlines[i] = x86.RestoreOrder(msrs)
		if err := c.do(func() error { return m.restoreVCPU(c, &states[i], first) }); err != nil {
			return err
		}
	}
	if err := m.restoreTSC(tsc); err != nil {
		return err
	}
	for i, c := range m.vcpus {
		if err := c.do(func() error { return m.setMSRs(c, deadlines[i]) }); err != nil {
			return fmt.Errorf("restore TSC deadline of vCPU %d: %w", c.id, err)
		}
	}
	return nil
}
