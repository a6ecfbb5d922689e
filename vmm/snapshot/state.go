package snapshot

import "fmt"

// StateVersion is the version of the state format this package writes. It reads this and version 1.
const StateVersion = 2

// State is a saved machine without its memory.
type State struct {
	ID       ID
	Shape    Shape
	CPU      CPU
	Host     Host
	Memory   Memory
	Clock    uint64 // kvmclock, ns
	IRQChips [][]byte
	VCPUs    []VCPU
	Devices  []Device
}

// Shape is what must be the same in the machine that takes the state.
type Shape struct {
	VCPUs       uint32
	MemoryBytes uint64
	Console     bool
	VsockCID    uint64 // 0: no vsock device
	Disks       []Disk
}

// Disk is one block device of a Shape.
type Disk struct {
	ID       string
	Bytes    uint64 // virtual size
	ReadOnly bool
}

// Host is the kernel a snapshot was taken on; empty in a state of version 1, which does not say.
type Host struct {
	Kernel string // its release, as uname -r has it
	KVM    string // the module behind /dev/kvm, such as kvm_amd
}

// MemoryKind says what the memory file of a snapshot is.
type MemoryKind uint8

// The kinds of memory file.
const (
	Full MemoryKind = 1 // flat image
	Diff MemoryKind = 2 // layers of pages that differ from a base image
)

func (k MemoryKind) String() string {
	switch k {
	case Full:
		return "full"
	case Diff:
		return "diff"
	}
	return fmt.Sprintf("kind %d", uint8(k))
}

// Memory describes the memory file. Sums are the checksums of the flat image, one per ChunkBytes: of the file itself if it is
// full, of its base if it is a diff, so that either can be verified with nothing but the state at hand.
type Memory struct {
	Kind MemoryKind
	Sums []uint32
	Top  Digest // name of the newest layer of a diff; zero for a full memory, and in a state of version 1
}

// VCPU is the state of one virtual CPU: the kernel's structs as they are (see vmm/kvm), and MSRs.
type VCPU struct {
	MPState   uint32
	TSCKHz    uint32
	Regs      []byte
	Sregs     []byte
	XSave     []byte
	XCRs      []byte
	DebugRegs []byte
	LAPIC     []byte
	Events    []byte
	CPUID     []byte
	MSRs      []MSR
}

// MSR is a model-specific register.
type MSR struct {
	Index uint32
	Data  uint64
}

// Device is the state of one emulated device, by name ("serial", "virtio 0", ...).
type Device struct {
	Name string
	Data []byte
}

// Device returns the state of the named device.
func (s *State) Device(name string) ([]byte, bool) {
	for _, d := range s.Devices {
		if d.Name == name {
			return d.Data, true
		}
	}
	return nil, false
}

// Difference names the first thing in which the machine o differs from the saved s, or returns "".
func (s Shape) Difference(o Shape) string {
	switch {
	case s.VCPUs != o.VCPUs:
		return fmt.Sprintf("saved with %d vCPUs, this machine has %d", s.VCPUs, o.VCPUs)
	case s.MemoryBytes != o.MemoryBytes:
		return fmt.Sprintf("saved with %d bytes of memory, this machine has %d", s.MemoryBytes, o.MemoryBytes)
	case s.Console != o.Console:
		return fmt.Sprintf("saved with console %t, this machine has console %t", s.Console, o.Console)
	case s.VsockCID != o.VsockCID:
		return fmt.Sprintf("saved with vsock CID %d, this machine has %d", s.VsockCID, o.VsockCID)
	case len(s.Disks) != len(o.Disks):
		return fmt.Sprintf("saved with %d disks, this machine has %d", len(s.Disks), len(o.Disks))
	}
	for i, d := range s.Disks {
		if d != o.Disks[i] {
			return fmt.Sprintf("disk %d was saved as %+v, this machine has %+v", i, d, o.Disks[i])
		}
	}
	return ""
}
