package machine

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"torpor/vmm/kvm"
	"torpor/vmm/snapshot"
	"torpor/vmm/x86"
)

// ErrCPU is wrapped by the error about a CPU template or a snapshot whose features this host lacks.
var ErrCPU = errors.New("this host's CPU is not enough")

// cpuid is what vCPU id is told.
func (m *Machine) cpuid(id int) ([]kvm.CPUIDEntry, error) {
	supported, err := m.host.kvm.SupportedCPUID()
	if err != nil {
		return nil, err
	}
	deadline, err := m.host.kvm.Extension(kvm.CapTSCDeadlineTimer)
	if err != nil {
		return nil, err
	}
	xsave, err := m.xsaveBytes()
	if err != nil {
		return nil, err
	}
	return x86.CPUID(supported, x86.CPU{
		ID: id, Count: len(m.vcpus), TSCDeadline: deadline != 0, XSaveBytes: xsave, Template: m.cpu,
	}), nil
}

// offered is what this host can promise a guest of this machine.
func (m *Machine) offered() (snapshot.CPU, error) {
	cpuid, err := m.cpuid(0)
	if err != nil {
		return snapshot.CPU{}, err
	}
	xsave, err := m.xsaveBytes()
	if err != nil {
		return snapshot.CPU{}, err
	}
	return m.fingerprint(cpuid, xsave), nil
}

// checkTemplate refuses a host that lacks what the machine's CPU template promises.
func (m *Machine) checkTemplate() error {
	host, err := m.offered()
	if err != nil {
		return err
	}
	need := m.fingerprint(m.cpu.Required(), 0)
	need.Vendor = host.Vendor
	if missing := need.Missing(host); len(missing) > 0 {
		return fmt.Errorf("%w for %s: it lacks %s", ErrCPU, m.cpu.Name(), strings.Join(missing, ", "))
	}
	return nil
}

// checkCPU refuses a snapshot of another template, and one whose features this host lacks.
func (m *Machine) checkCPU(saved snapshot.CPU) error {
	if saved.Template != m.cpu.Name() {
		return &snapshot.Error{Part: "state, section cpu 0", Err: fmt.Errorf(
			"%w: saved with CPU template %q, this machine has %q", snapshot.ErrMismatch, saved.Template, m.cpu.Name())}
	}
	host, err := m.offered()
	if err != nil {
		return err
	}
	if missing := saved.Missing(host); len(missing) > 0 {
		return fmt.Errorf("%w to run the snapshot: it lacks %s", ErrCPU, strings.Join(missing, ", "))
	}
	return nil
}

// checkHost refuses a snapshot of another KVM: what a guest may do, and what its state means, is that KVM's. Another release of the
// kernel is only told of.
func (m *Machine) checkHost(saved snapshot.Host) error {
	here := m.host.kernel
	if saved.KVM != "" && here.KVM != "" && saved.KVM != here.KVM {
		return fmt.Errorf("%w to run the snapshot: it is of %s, this host has %s", ErrCPU, saved.KVM, here.KVM)
	}
	if saved.Kernel != "" && saved.Kernel != here.Kernel {
		m.log.Warn().Str("saved", saved.Kernel).Str("here", here.Kernel).Msg("the snapshot is of another kernel release")
	}
	return nil
}

// ownBits are CPUID bits that mirror what the guest's kernel has switched on, not what the CPU can do: OSXSAVE and OSPKE.
var ownBits = []snapshot.Features{
	{Leaf: 0x1, Register: snapshot.ECX, Bits: 1 << 27},
	{Leaf: 0x7, Register: snapshot.ECX, Bits: 1 << 4},
}

// fingerprint is what a guest with this CPUID table relies on.
func (m *Machine) fingerprint(entries []kvm.CPUIDEntry, xsaveBytes int) snapshot.CPU {
	cpu := snapshot.CPU{XSaveBytes: uint32(xsaveBytes), Template: m.cpu.Name()}
	words := snapshot.FeatureWords()
	for _, e := range entries {
		if e.Function == 0 {
			var vendor []byte
			for _, r := range []uint32{e.EBX, e.EDX, e.ECX} {
				vendor = binary.LittleEndian.AppendUint32(vendor, r)
			}
			cpu.Vendor = string(vendor)
		}
		for i, w := range words {
			if w.Leaf == e.Function && w.Index == e.Index {
				words[i].Bits = [...]uint32{e.EAX, e.EBX, e.ECX, e.EDX}[w.Register]
			}
		}
	}
	for _, own := range ownBits {
		for i, w := range words {
			if w.Leaf == own.Leaf && w.Index == own.Index && w.Register == own.Register {
				words[i].Bits &^= own.Bits
			}
		}
	}
	cpu.Features = words
	return cpu
}
