package machine

import (
	"crypto/rand"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"torpor/vmm/kvm"
	"torpor/vmm/snapshot"
	"torpor/vmm/x86"
)

// irqChips are the interrupt controllers of the VM, in the order they are saved and restored.
var irqChips = []uint32{kvm.IRQChipPICMaster, kvm.IRQChipPICSlave, kvm.IRQChipIOAPIC}

// Saved is what Save wrote.
type Saved struct {
	StateBytes  uint64
	MemoryBytes uint64 // allocated on disk
	DataPages   uint64 // stored
	ZeroPages   uint64 // recorded as zero without data
	ElidedPages uint64 // written by the guest, but equal to the base
}

// Save writes state and memory of a paused machine to two new files and makes them durable; it flushes the disks too. The
// machine stays paused and may be resumed, whatever comes of it. On error neither file is left behind.
func (m *Machine) Save(kind snapshot.MemoryKind, statePath, memoryPath string) (_ Saved, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch State(m.state.Load()) {
	case Ended:
		return Saved{}, ErrEnded
	case Running:
		return Saved{}, ErrNotPaused
	case Paused:
	}
	if kind == snapshot.Diff && m.ram.base == nil {
		return Saved{}, fmt.Errorf("%w: a diff needs a machine restored from base memory", ErrConfig)
	}
	if err := m.flushLocked(); err != nil {
		return Saved{}, err
	}
	state, err := m.stateLocked() // before memory: a device may still write to it
	if err != nil {
		return Saved{}, err
	}
	state.Memory = snapshot.Memory{Kind: kind, Sums: m.baseSums}
	var saved Saved
	err = createFile(memoryPath, func(f *os.File) (err error) {
		if kind == snapshot.Diff {
			saved, err = m.ram.writeDiff(f, state.ID)
			return err
		}
		saved, state.Memory.Sums, err = m.ram.writeFull(f)
		return err
	})
	if err != nil {
		return Saved{}, fmt.Errorf("save memory: %w", err)
	}
	raw := state.Encode()
	err = createFile(statePath, func(f *os.File) error {
		_, err := f.Write(raw)
		return err
	})
	if err != nil {
		_ = os.Remove(memoryPath)
		return Saved{}, fmt.Errorf("save state: %w", err)
	}
	saved.StateBytes = uint64(len(raw))
	saved.MemoryBytes = allocated(memoryPath)
	return saved, nil
}

// createFile makes a file that must not exist, and makes it durable. It is removed again if anything fails. O_EXCL is also
// what keeps a save from writing into a file that this or another machine has mapped.
func createFile(path string, write func(*os.File) error) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	err = write(f)
	if err == nil {
		err = os.NewSyscallError("fdatasync", unix.Fdatasync(int(f.Fd())))
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		_ = os.Remove(path)
	}
	return err
}

// allocated is the room a file takes on disk, in bytes; 0 if it cannot be known.
func allocated(path string) uint64 {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0
	}
	return uint64(st.Blocks) * 512
}

// stateLocked collects everything but memory. Devices come first: what they still do can reach the interrupt controllers.
func (m *Machine) stateLocked() (*snapshot.State, error) {
	s := &snapshot.State{Shape: m.shape, Clock: m.clock}
	_, _ = rand.Read(s.ID[:]) // never fails (crypto/rand)
	for _, slot := range m.bus.slots {
		b, err := slot.transport.Save()
		if err != nil {
			return nil, fmt.Errorf("save %s: %w", slot.name, err)
		}
		s.Devices = append(s.Devices, snapshot.Device{Name: slot.name, Data: b})
	}
	if m.bus.ports.Serial != nil {
		s.Devices = append(s.Devices, snapshot.Device{Name: serialName, Data: m.bus.ports.Serial.Save()})
	}
	supported, err := m.kvm.MSRIndexList()
	if err != nil {
		return nil, fmt.Errorf("save vCPUs: %w", err)
	}
	msrs := x86.SavedMSRs(supported)
	xsave, err := m.xsaveBytes()
	if err != nil {
		return nil, err
	}
	for _, c := range m.vcpus {
		var v snapshot.VCPU
		if err := c.do(func() (err error) { v, err = m.saveVCPU(c, msrs, xsave); return err }); err != nil {
			return nil, err
		}
		s.VCPUs = append(s.VCPUs, v)
	}
	for _, id := range irqChips {
		chip, err := m.vm.IRQChip(id)
		if err != nil {
			return nil, fmt.Errorf("save interrupt controllers: %w", err)
		}
		s.IRQChips = append(s.IRQChips, pack(&chip))
	}
	cpuid, err := unpackCPUID(s.VCPUs[0].CPUID)
	if err != nil {
		return nil, err
	}
	offered, err := m.offered()
	if err != nil {
		return nil, err
	}
	// A KVM that cannot hide the processor (PVM runs CPUID natively) reports features it does not support. Its guests may see
	// them, but nobody promised them, and the same host must not refuse its own snapshot for their lack.
	s.CPU = m.fingerprint(cpuid, xsave).Within(offered)
	return s, nil
}

// serialName is the serial port's name among the devices of a state.
const serialName = "serial"

// xsaveBytes is the size of a vCPU's extended state on this host.
func (m *Machine) xsaveBytes() (int, error) {
	n, err := m.vm.Extension(kvm.CapXSave2)
	if err != nil {
		return 0, fmt.Errorf("size of extended state: %w", err)
	}
	return max(n, 4096), nil // 0: a kernel before 5.17, whose area is always 4096 bytes
}
