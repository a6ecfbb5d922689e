package kvm

import "encoding/binary"

// Offsets in struct kvm_run (linux/kvm.h), the page the kernel shares with each vCPU.
const (
	runImmediateExit = 1
	runExitReason    = 8
	runUnion         = 32 // the union that the exit reason selects
	runIODirection   = runUnion
	runIOSize        = runUnion + 1
	runIOPort        = runUnion + 2
	runIOCount       = runUnion + 4
	runIODataOffset  = runUnion + 8
	runMMIOAddr      = runUnion
	runMMIOData      = runUnion + 8
	runMMIOLen       = runUnion + 16
	runMMIOIsWrite   = runUnion + 20
	minRunBytes      = 2352 // sizeof(struct kvm_run); port data lies behind it
)

// Exit returns the reason of the last Run that returned nil.
func (v *VCPU) Exit() ExitReason {
	return ExitReason(binary.LittleEndian.Uint32(v.page[runExitReason:]))
}

// IO is a port access (ExitIO).
type IO struct {
	Port  uint16
	Size  int  // bytes per access: 1, 2 or 4
	Write bool // the guest writes (OUT)
	// Data holds every access of a repeated instruction, Size bytes each, and aliases kvm_run: what is left in it by a
	// handler of a read is what the guest sees, so a handler must overwrite all of it.
	Data []byte
}

// IO decodes an ExitIO. ok is false when the kernel's numbers do not fit its own mapping.
func (v *VCPU) IO() (io IO, ok bool) {
	size := int(v.page[runIOSize])
	count := uint64(binary.LittleEndian.Uint32(v.page[runIOCount:]))
	off := binary.LittleEndian.Uint64(v.page[runIODataOffset:])
	n := count * uint64(size)
	if size == 0 || off > uint64(len(v.page)) || n > uint64(len(v.page))-off {
		return IO{}, false
	}
	return IO{
		Port: binary.LittleEndian.Uint16(v.page[runIOPort:]), Size: size, Write: v.page[runIODirection] == 1,
		Data: v.page[off : off+n : off+n],
	}, true
}

// MMIO is an access to guest-physical memory without RAM (ExitMMIO).
type MMIO struct {
	Addr  uint64
	Write bool
	Data  []byte // 1 to 8 bytes, aliases kvm_run: a handler of a read must fill all of it
}

// MMIO decodes an ExitMMIO. ok is false when the length is not 1 to 8.
func (v *VCPU) MMIO() (m MMIO, ok bool) {
	n := binary.LittleEndian.Uint32(v.page[runMMIOLen:])
	if n == 0 || n > 8 {
		return MMIO{}, false
	}
	return MMIO{
		Addr: binary.LittleEndian.Uint64(v.page[runMMIOAddr:]), Write: v.page[runMMIOIsWrite] != 0,
		Data: v.page[runMMIOData : runMMIOData+n : runMMIOData+n],
	}, true
}

// Suberror returns the first word of the union: the sub-error of ExitInternalError, the low word of the hardware reason of
// ExitFailEntry, the type of ExitSystemEvent.
func (v *VCPU) Suberror() uint32 { return binary.LittleEndian.Uint32(v.page[runUnion:]) }
