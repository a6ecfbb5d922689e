package kvm

// The structs here have the layout of the kernel's struct of the same purpose; kvm_unsafe.go pins their sizes.

// Regs is struct kvm_regs.
type Regs struct {
	RAX, RBX, RCX, RDX, RSI, RDI, RSP, RBP uint64
	R8, R9, R10, R11, R12, R13, R14, R15   uint64
	RIP, RFlags                            uint64
}

// Segment is struct kvm_segment.
type Segment struct {
	Base                            uint64
	Limit                           uint32
	Selector                        uint16
	Type, Present, DPL, DB, S, L, G uint8
	AVL, Unusable                   uint8
	_                               uint8
}

// Table is struct kvm_dtable: a descriptor table register.
type Table struct {
	Base  uint64
	Limit uint16
	_     [3]uint16
}

// Sregs is struct kvm_sregs.
type Sregs struct {
	CS, DS, ES, FS, GS, SS  Segment
	TR, LDT                 Segment
	GDT, IDT                Table
	CR0, CR2, CR3, CR4, CR8 uint64
	EFER                    uint64
	APICBase                uint64
	InterruptBitmap         [4]uint64
}

// Opaque per-vCPU state, kept as the bytes the kernel gives.
type (
	// LAPIC is struct kvm_lapic_state: the 1 KiB register page.
	LAPIC [1024]byte
	// XCRs is struct kvm_xcrs.
	XCRs [392]byte
	// DebugRegs is struct kvm_debugregs.
	DebugRegs [128]byte
	// VCPUEvents is struct kvm_vcpu_events.
	VCPUEvents [64]byte
)

// IRQChip is struct kvm_irqchip; State is a union whose meaning depends on the chip.
type IRQChip struct {
	ID    uint32
	_     uint32
	State [512]byte
}

// Clock is struct kvm_clock_data. Clock is the guest's kvmclock in nanoseconds.
type Clock struct {
	Clock    uint64
	Flags    uint32
	_        uint32
	Realtime uint64
	HostTSC  uint64
	_        [4]uint32
}

// CPUIDEntry is struct kvm_cpuid_entry2.
type CPUIDEntry struct {
	Function, Index, Flags uint32
	EAX, EBX, ECX, EDX     uint32
	_                      [3]uint32
}

// MSR is struct kvm_msr_entry.
type MSR struct {
	Index uint32
	_     uint32
	Data  uint64
}

// MaxMSRs is the most MSRs one GetMSRs or SetMSRs may carry (the kernel's own limit).
const MaxMSRs = 256

// maxCPUID bounds the CPUID table; kernels report well below 100 entries and accept 256.
const maxCPUID = 256

type cpuidTable struct {
	n, _    uint32
	entries [maxCPUID]CPUIDEntry
}

type msrTable struct {
	n, _    uint32
	entries [MaxMSRs]MSR
}

type msrList struct {
	n       uint32
	indices [1024]uint32
}

// userMemory is struct kvm_userspace_memory_region.
type userMemory struct {
	slot            uint32
	_               uint32 // flags
	guestPhys, size uint64
	userspaceAddr   uint64
}

// irqfdArg is struct kvm_irqfd.
type irqfdArg struct {
	fd, gsi uint32
	_       [2]uint32 // flags, resamplefd
	_       [16]byte
}

// ioeventfdArg is struct kvm_ioeventfd.
type ioeventfdArg struct {
	datamatch, addr uint64
	len             uint32
	fd              int32
	flags           uint32
	_               [36]byte
}

// deviceAttr is struct kvm_device_attr.
type deviceAttr struct {
	_          uint32 // flags
	group      uint32
	attr, addr uint64
}
