package x86

import (
	"encoding/binary"

	"torpor/vmm/kvm"
)

// Control register and EFER bits (SDM volume 3, sections 2.2 and 2.5).
const (
	cr0PE   = 1 << 0
	cr0ET   = 1 << 4
	cr0PG   = 1 << 31
	cr4PAE  = 1 << 5
	eferLME = 1 << 8
	eferLMA = 1 << 10

	rflagsReserved = 1 << 1 // always 1
)

// Selectors the 64-bit boot protocol wants: __BOOT_CS and __BOOT_DS.
const (
	selectorCode = 0x10
	selectorData = 0x18
	selectorTSS  = 0x20
)

// GDT returns the descriptor table for GDTAddr: null, null, 64-bit code, data, TSS.
func GDT() []byte {
	entries := []uint64{0, 0, 0x00af9b000000ffff, 0x00cf93000000ffff, 0x008f8b000000ffff}
	var b []byte
	for _, e := range entries {
		b = binary.LittleEndian.AppendUint64(b, e)
	}
	return b
}

// PageTables returns the three pages for PML4Addr: an identity map of the first GiB in 2 MiB pages.
func PageTables() []byte {
	const (
		table = 0x03 // present, writable
		large = 0x83 // and a 2 MiB page
	)
	b := make([]byte, 3*PageSize)
	binary.LittleEndian.PutUint64(b, PDPTAddr|table)
	binary.LittleEndian.PutUint64(b[PageSize:], PDAddr|table)
	for i := range uint64(512) {
		binary.LittleEndian.PutUint64(b[2*PageSize+8*i:], i<<21|large)
	}
	return b
}

// BootRegs returns the general registers of the boot CPU at the kernel's 64-bit entry point.
func BootRegs(entry uint64) kvm.Regs {
	return kvm.Regs{RIP: entry, RSI: ZeroPageAddr, RSP: StackAddr, RBP: StackAddr, RFlags: rflagsReserved}
}

// BootSregs returns s, the reset state KVM gives, changed to long mode with the tables above.
func BootSregs(s kvm.Sregs) kvm.Sregs {
	code := kvm.Segment{Limit: 0xffffffff, Selector: selectorCode, Type: 0xb, Present: 1, S: 1, L: 1, G: 1}
	data := kvm.Segment{Limit: 0xffffffff, Selector: selectorData, Type: 0x3, Present: 1, DB: 1, S: 1, G: 1}
	s.CS = code
	s.DS, s.ES, s.FS, s.GS, s.SS = data, data, data, data, data
	s.TR = kvm.Segment{Limit: 0xffff, Selector: selectorTSS, Type: 0xb, Present: 1}
	s.GDT.Base, s.GDT.Limit = GDTAddr, uint16(len(GDT())-1)
	s.IDT.Base, s.IDT.Limit = IDTAddr, 7
	s.CR0 = cr0PE | cr0ET | cr0PG
	s.CR3 = PML4Addr
	s.CR4 = cr4PAE
	s.EFER = eferLME | eferLMA
	return s
}

// Local APIC registers (SDM volume 3, section 11.5.1) and delivery modes.
const (
	lapicLINT0    = 0x350
	lapicLINT1    = 0x360
	deliverMask   = 7 << 8
	deliverNMI    = 4 << 8
	deliverExtINT = 7 << 8
)

// SetLINT wires the local interrupt pins as firmware does: LINT0 to the PIC, LINT1 to NMI.
func SetLINT(l *kvm.LAPIC) {
	set := func(reg int, mode uint32) {
		v := binary.LittleEndian.Uint32(l[reg:])
		binary.LittleEndian.PutUint32(l[reg:], v&^deliverMask|mode)
	}
	set(lapicLINT0, deliverExtINT)
	set(lapicLINT1, deliverNMI)
}
