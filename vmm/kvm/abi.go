package kvm

// The structs here have the layout of the kernel's struct of the same purpose; the header that defines it is named with each.
// abi_unsafe.go pins sizes and offsets.

// Regs is struct kvm_regs (asm/kvm.h): the general registers.
type Regs struct {
	RAX, RBX, RCX, RDX, RSI, RDI, RSP, RBP uint64
	R8, R9, R10, R11, R12, R13, R14, R15   uint64
	RIP, RFlags                            uint64
}

// Segment is struct kvm_segment (asm/kvm.h): a segment register with its hidden part. Limit is in bytes even where G is set.
type Segment struct {
	Base                            uint64
	Limit                           uint32
	Selector                        uint16
	Type, Present, DPL, DB, S, L, G uint8
	AVL, Unusable                   uint8
	_                               uint8
}

// Table is struct kvm_dtable (asm/kvm.h): a descriptor table register.
type Table struct {
	Base  uint64
	Limit uint16
	_     [3]uint16
}

// Sregs is struct kvm_sregs (asm/kvm.h): the special registers.
type Sregs struct {
	CS, DS, ES, FS, GS, SS  Segment
	TR, LDT                 Segment
	GDT, IDT                Table
	CR0, CR2, CR3, CR4, CR8 uint64
	EFER                    uint64
	APICBase                uint64
	InterruptBitmap         [4]uint64 // the external interrupt that waits to be delivered, one bit per vector
}

// Opaque per-vCPU state, kept as the bytes the kernel gives.
type (
	// LAPIC is struct kvm_lapic_state (asm/kvm.h): the 1 KiB register page.
	LAPIC [1024]byte
	// XCRs is struct kvm_xcrs (asm/kvm.h).
	XCRs [392]byte
	// DebugRegs is struct kvm_debugregs (asm/kvm.h).
	DebugRegs [128]byte
	// VCPUEvents is struct kvm_vcpu_events (asm/kvm.h): exceptions, interrupts and NMIs on their way.
	VCPUEvents [64]byte
)

// xsaveBytes is the size of struct kvm_xsave (asm/kvm.h) without its flexible end, and of the area before Linux 5.17.
const xsaveBytes = 4096

// IRQChip is struct kvm_irqchip (linux/kvm.h); State is a union whose meaning depends on the chip.
type IRQChip struct {
	ID    uint32
	_     uint32
	State [512]byte
}

// Clock is struct kvm_clock_data (linux/kvm.h). Clock is the guest's kvmclock in nanoseconds.
type Clock struct {
	Clock    uint64
	Flags    uint32
	_        uint32
	Realtime uint64
	HostTSC  uint64
	_        [4]uint32
}

// CPUIDEntry is struct kvm_cpuid_entry2 (asm/kvm.h): what CPUID answers for a leaf (Function) and sub-leaf (Index).
type CPUIDEntry struct {
	Function, Index, Flags uint32
	EAX, EBX, ECX, EDX     uint32
	_                      [3]uint32
}

// MSR is struct kvm_msr_entry (asm/kvm.h).
type MSR struct {
	Index uint32
	_     uint32
	Data  uint64
}

// MaxMSRs is the most MSRs one MSRs or SetMSRs may carry: MAX_IO_MSRS of the kernel (arch/x86/kvm/x86.c), less one since the kernel
// demands fewer.
const MaxMSRs = 255

// maxCPUID bounds the CPUID table: KVM_MAX_CPUID_ENTRIES of the kernel (arch/x86/include/asm/kvm_host.h). Hosts report well below
// 100 entries.
const maxCPUID = 256

// cpuidTable is struct kvm_cpuid2 (asm/kvm.h).
type cpuidTable struct {
	n, _    uint32
	entries [maxCPUID]CPUIDEntry
}

// msrTable is struct kvm_msrs (asm/kvm.h).
type msrTable struct {
	n, _    uint32
	entries [MaxMSRs]MSR
}

// msrList is struct kvm_msr_list (asm/kvm.h), with room for more than any kernel has.
type msrList struct {
	n       uint32
	indices [1024]uint32
}

// userMemory is struct kvm_userspace_memory_region (linux/kvm.h).
type userMemory struct {
	slot            uint32
	_               uint32 // flags
	guestPhys, size uint64
	userspaceAddr   uint64
}

// irqLevel is struct kvm_irq_level (linux/kvm.h).
type irqLevel struct{ irq, level uint32 }

// ioeventfdArg is struct kvm_ioeventfd (linux/kvm.h).
type ioeventfdArg struct {
	datamatch, addr uint64
	len             uint32
	fd              int32
	flags           uint32
	_               [36]byte
}

// deviceAttr is struct kvm_device_attr (linux/kvm.h).
type deviceAttr struct {
	_          uint32 // flags
	group      uint32
	attr, addr uint64
}
