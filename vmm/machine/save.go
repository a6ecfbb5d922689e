package machine

import (
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"torpor/vmm/kvm"
	"torpor/vmm/snapshot"
	"torpor/vmm/virtio/mmio"
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
	BasePages   uint64 // recorded as equal to the base without data
	ElidedPages uint64 // written by the guest, but equal to what is below

	StateSHA256 [sha256.Size]byte
	Memory      snapshot.Digest // names the memory file
	Parent      snapshot.Digest // names what that lies upon; zero for a full memory
}

// SaveKind says what memory Save writes.
type SaveKind int

// The kinds.
const (
	SaveFull       SaveKind = iota + 1 // a flat image
	SaveDiff                           // a layer: what differs from what the machine was restored from
	SaveCumulative                     // a layer: what differs from the base
)

// SaveOptions say how to save.
type SaveOptions struct {
	Kind           SaveKind
	BytesPerSecond uint64     // at most this much is written in a second; 0: no limit
	Tops           []*os.File // new tops of the disks after a save that succeeded; none: they keep theirs
}

// Save writes state and memory of a paused machine to two files, which are empty and open for reading and writing, and makes
// them durable; it flushes the disks too. It closes the files, whatever comes of it; on error their contents mean nothing. The
// machine stays paused and may be resumed.
func (m *Machine) Save(o SaveOptions, state, memory *os.File) (saved Saved, err error) {
	defer func() {
		closeFiles(o.Tops...)
		err = errors.Join(err, state.Close(), memory.Close())
	}()
	if err := m.ram.verifier.wait(); err != nil {
		return Saved{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch State(m.state.Load()) {
	case Ended:
		return Saved{}, ErrEnded
	case Running:
		return Saved{}, ErrNotPaused
	case Paused:
	}
	if err := m.canSave(o); err != nil {
		return Saved{}, err
	}
	// A file with something in it may be one that this or another machine has mapped.
	if err := errors.Join(checkEmpty(state), checkEmpty(memory)); err != nil {
		return Saved{}, err
	}
	if err := m.flushLocked(); err != nil {
		return Saved{}, err
	}
	plan, err := m.planLocked(o.Kind, (*mmio.Transport).Save)
	if err != nil {
		return Saved{}, err
	}
	pace, err := newPace(o.BytesPerSecond)
	if err != nil {
		return Saved{}, err
	}
	if saved, err = m.write(plan, m.ram, state, memory, pace); err != nil || len(o.Tops) == 0 {
		return saved, err
	}
	files := o.Tops
	o.Tops = nil // the disks', or closed
	tops, err := m.readyTops(files)
	if err != nil {
		return saved, err
	}
	return saved, m.freezeLocked(tops)
}

func (m *Machine) canSave(o SaveOptions) error {
	if len(o.Tops) > 0 {
		if err := m.checkTops(o.Tops); err != nil {
			return err
		}
	}
	return m.canSaveMemory(o.Kind)
}

func (m *Machine) canSaveMemory(kind SaveKind) error {
	switch {
	case kind < SaveFull || kind > SaveCumulative:
		return fmt.Errorf("%w: save kind %d", ErrConfig, kind)
	case kind != SaveFull && m.ram.from.base == nil:
		return fmt.Errorf("%w: a diff needs a machine restored from base memory", ErrConfig)
	}
	return nil
}

// write writes memory, read from a source, and then the state. The machine may run if the source lets it.
func (m *Machine) write(p savePlan, from source, stateFile, memoryFile *os.File, pace *pace) (saved Saved, err error) {
	state := p.state
	if p.layer == nil {
		state.Memory.Kind = snapshot.Full
		saved, state.Memory.Sums, err = m.ram.writeFull(from, memoryFile, p.written, pace)
		saved.Memory = state.Base()
	} else {
		job := &layerJob{layerPlan: p.layer, from: from, f: memoryFile, pace: pace}
		saved, err = job.write(state.ID, m.ram.baseDigest)
		state.Memory = snapshot.Memory{Kind: snapshot.Diff, Sums: m.baseSums, Top: saved.Memory}
	}
	if err == nil {
		err = datasync(memoryFile)
	}
	if err != nil {
		return Saved{}, fmt.Errorf("save memory: %w", err)
	}
	raw := state.Encode()
	_, err = stateFile.WriteAt(raw, 0)
	if err == nil {
		err = datasync(stateFile)
	}
	if err != nil {
		return Saved{}, fmt.Errorf("save state: %w", err)
	}
	saved.StateBytes, saved.StateSHA256 = uint64(len(raw)), sha256.Sum256(raw)
	saved.MemoryBytes = allocated(memoryFile)
	return saved, nil
}

// checkEmpty is an ErrConfig (wrapped) for a file that there is something in.
func checkEmpty(f *os.File) error {
	info, err := f.Stat()
	if err == nil && info.Size() != 0 {
		err = fmt.Errorf("%w: the file to save to has %d bytes", ErrConfig, info.Size())
	}
	return err
}

func datasync(f *os.File) error { return os.NewSyscallError("fdatasync", unix.Fdatasync(int(f.Fd()))) }

// allocated is the room a file takes on disk, in bytes; 0 if it cannot be known.
func allocated(f *os.File) uint64 {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0
	}
	return uint64(st.Blocks) * 512
}

// stateLocked collects everything but memory. Devices come first: what they still do can reach the interrupt controllers. of is
// how a device is saved.
func (m *Machine) stateLocked(of func(*mmio.Transport) ([]byte, error)) (*snapshot.State, error) {
	s := &snapshot.State{Shape: m.shape, Clock: m.clock, Host: m.host.kernel}
	_, _ = rand.Read(s.ID[:]) // never fails (crypto/rand)
	for _, slot := range m.bus.slots {
		b, err := of(slot.transport)
		if err != nil {
			return nil, fmt.Errorf("save %s: %w", slot.name, err)
		}
		s.Devices = append(s.Devices, snapshot.Device{Name: slot.name, Data: b})
	}
	if m.bus.ports.Serial != nil {
		s.Devices = append(s.Devices, snapshot.Device{Name: serialName, Data: m.bus.ports.Serial.Save()})
	}
	supported, err := m.host.kvm.MSRIndexList()
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
