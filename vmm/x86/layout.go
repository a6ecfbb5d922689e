// Package x86 knows what a PC looks like to a 64-bit Linux kernel at its first instruction: where things lie in guest-physical
// memory, what CPUID says, which MSRs make up a vCPU, and the register state of the 64-bit boot protocol.
//
// It computes bytes and register values; it touches neither KVM nor guest memory. It may import vmm/kvm for its types only.
// Sources: the kernel's Documentation/arch/x86/{boot,zero-page}.rst, Intel SDM volume 3, AMD APM volumes 2 and 3, and
// Documentation/virt/kvm/x86/{cpuid,msr}.rst.
package x86

// The memory map, in guest-physical addresses.
//
//	0x0000_0500  GDT, IDT                     0x000e_0000  ACPI tables
//	0x0000_6000  setup_data (RNG seed)        0x0010_0000  RAM, up to the hole or the end
//	0x0000_7000  zero page (boot_params)      0x0100_0000  the kernel (its own link address)
//	0x0000_8ff0  boot stack, growing down     top of low RAM: initrd
//	0x0000_9000  page tables (3 pages)        0xc000_0000  hole: MMIO, I/O APIC, local APIC
//	0x0002_0000  command line                 0x1_0000_0000  RAM beyond 3 GiB
const (
	GDTAddr       = 0x500
	IDTAddr       = 0x520
	SetupDataAddr = 0x6000
	ZeroPageAddr  = 0x7000
	StackAddr     = 0x8ff0
	PML4Addr      = 0x9000
	PDPTAddr      = 0xa000
	PDAddr        = 0xb000
	CmdlineAddr   = 0x20000
	LowRAMEnd     = 0x9fc00 // the last KiB below 640 KiB is the EBDA on a PC
	ACPIAddr      = 0xe0000 // where firmware leaves the RSDP: 0xe0000-0xfffff is searched by 32-bit kernels
	ACPIEnd       = 0x100000
	HighRAMAddr   = 0x100000

	HoleAddr     = 0xc0000000 // RAM stops here and continues at 4 GiB
	HoleEnd      = 0x100000000
	MMIOAddr     = 0xc0000000 // virtio-mmio slot n lies at MMIOAddr + n*MMIOSlot
	MMIOSlot     = 0x1000
	IOAPICAddr   = 0xfec00000
	LAPICAddr    = 0xfee00000
	IdentityAddr = 0xfffbc000 // KVM_SET_IDENTITY_MAP_ADDR, one page
	TSSAddr      = 0xfffbd000 // KVM_SET_TSS_ADDR, three pages
)

// Interrupts (GSIs of the one I/O APIC) and ports.
const (
	UARTGSI       = 4
	VirtioGSI     = 5 // virtio slot n interrupts on VirtioGSI + n
	UARTPort      = 0x3f8
	I8042Port     = 0x64
	I8042Reset    = 0xfe  // written to I8042Port, resets the machine
	SleepCtlPort  = 0x600 // ACPI sleep control register, one byte
	SleepStatPort = 0x601 // ACPI sleep status register, one byte
)

// MaxCmdline is the longest kernel command line, without the NUL (cmdline_size of Debian's kernel).
const MaxCmdline = 2047

// Limits of a machine, memory in bytes.
const (
	MinMemory     = 128 << 20
	MaxMemory     = 16 << 30
	MemoryAlign   = 2 << 20
	MaxVCPUs      = 8
	MaxVirtioSlot = 24 - VirtioGSI // pins of the I/O APIC
)

// Range is a run of guest-physical addresses.
type Range struct{ Addr, Size uint64 }

// RAM returns where size bytes of memory lie: one range, or two around the hole below 4 GiB.
func RAM(size uint64) []Range {
	if size <= HoleAddr {
		return []Range{{0, size}}
	}
	return []Range{{0, HoleAddr}, {HoleEnd, size - HoleAddr}}
}
