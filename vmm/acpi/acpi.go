// Package acpi writes the ACPI tables of a hardware-reduced PC: how many CPUs there are, where the I/O APIC is, which
// virtio-mmio devices exist, and how to turn the machine off. There is no firmware and no ACPI hardware behind them but the
// sleep and reset registers.
//
// Tables and field offsets are those of the ACPI specification 6.5, section 5.2; the byte code is section 20. The package
// produces bytes for one contiguous area and touches no guest memory.
package acpi

import "encoding/binary"

// Config describes the machine to the guest.
type Config struct {
	Addr     uint64 // guest-physical address of the area; the RSDP is its first structure
	CPUs     int    // APIC ids 0 to CPUs-1
	LAPIC    uint64
	IOAPIC   uint64
	Virtio   []VirtioMMIO
	UART     *UART  // nil: no serial port
	SleepCtl uint16 // I/O port of the sleep control register
	SleepSts uint16 // I/O port of the sleep status register
	Reset    uint16 // I/O port of the reset register
	ResetVal uint8  // value that resets
}

// VirtioMMIO is one virtio-mmio window, 4 KiB long, with an edge-triggered interrupt.
type VirtioMMIO struct {
	Base uint32
	GSI  uint32
}

// UART is a 16550A.
type UART struct {
	Port uint16
	GSI  uint32
}

// SleepTypeOff is the sleep type of S5 (off). The guest writes SleepTypeOff<<2 | SleepEnable to the sleep control register.
const (
	SleepTypeOff = 5
	SleepEnable  = 1 << 5
)

const (
	rsdpBytes   = 36
	headerBytes = 36
	fadtBytes   = 276

	// FADT IA-PC boot architecture flags, table 5.10. The 8042 bit (1) stays clear: nothing is probed on its ports.
	archNoVGA  = 1 << 2
	archNoMSI  = 1 << 3
	archNoASPM = 1 << 4
	archNoRTC  = 1 << 5 // without it Linux polls an absent CMOS clock for a second

	// FADT fixed feature flags, table 5.9. The two button bits say that there is no fixed-hardware button.
	fixedPowerButton = 1 << 4
	fixedSleepButton = 1 << 5
	fixedResetReg    = 1 << 10
	fixedHWReduced   = 1 << 20

	gasSystemIO = 1 // generic address structure: I/O space
	gasByte     = 1 // access size

	madtLAPIC   = 0
	madtIOAPIC  = 1
	cpuEnabled  = 1
	hypervisor  = "TORPOR\x00\x00"
	oemID       = "TORPOR"
	oemTableID  = "TORPORVM"
	oemRevision = 1
)

var le = binary.LittleEndian

// Build returns the tables as one area for c.Addr.
func Build(c Config) []byte {
	area := make([]byte, rsdpBytes)
	place := func(table []byte) (addr uint64) {
		for len(area)%16 != 0 {
			area = append(area, 0)
		}
		addr = c.Addr + uint64(len(area))
		area = append(area, table...)
		return addr
	}
	dsdt := place(c.dsdt())
	fadt := place(c.fadt(dsdt))
	madt := place(c.madt())

	var entries []byte
	for _, addr := range []uint64{fadt, madt} {
		entries = le.AppendUint64(entries, addr)
	}
	copy(area, rsdp(place(table("XSDT", 1, entries))))
	return area
}

// rsdp returns the root system description pointer, section 5.2.5.3.
func rsdp(xsdt uint64) []byte {
	b := make([]byte, rsdpBytes)
	copy(b, "RSD PTR ")
	copy(b[9:], oemID)
	b[15] = 2 // revision
	le.PutUint32(b[20:], rsdpBytes)
	le.PutUint64(b[24:], xsdt)
	b[8] = checksum(b[:20])
	b[32] = checksum(b)
	return b
}

// table returns a system description table, section 5.2.6: header, body, and a checksum that makes all bytes sum to zero.
func table(signature string, revision uint8, body []byte) []byte {
	b := make([]byte, headerBytes, headerBytes+len(body))
	copy(b, signature)
	le.PutUint32(b[4:], uint32(headerBytes+len(body)))
	b[8] = revision
	copy(b[10:], oemID)
	copy(b[16:], oemTableID)
	le.PutUint32(b[24:], oemRevision)
	copy(b[28:], "TRPR")
	le.PutUint32(b[32:], oemRevision)
	b = append(b, body...)
	b[9] = checksum(b)
	return b
}

func checksum(b []byte) uint8 {
	var sum uint8
	for _, v := range b {
		sum += v
	}
	return -sum
}

// fadt returns the fixed description table, section 5.2.9. Offsets are counted from the header.
func (c Config) fadt(dsdt uint64) []byte {
	b := make([]byte, fadtBytes)
	le.PutUint16(b[109:], archNoVGA|archNoMSI|archNoASPM|archNoRTC)
	le.PutUint32(b[112:], fixedPowerButton|fixedSleepButton|fixedResetReg|fixedHWReduced)
	putPort(b[116:], c.Reset)
	b[128] = c.ResetVal
	b[131] = 5 // minor version
	le.PutUint64(b[140:], dsdt)
	putPort(b[244:], c.SleepCtl)
	putPort(b[256:], c.SleepSts)
	copy(b[268:], hypervisor)
	return table("FACP", 6, b[headerBytes:])
}

// putPort writes a generic address structure (section 5.2.3.2) for a one-byte I/O port.
func putPort(b []byte, port uint16) {
	b[0], b[1], b[3] = gasSystemIO, 8, gasByte
	le.PutUint64(b[4:], uint64(port))
}

// madt returns the interrupt controller table, section 5.2.12. Flags are 0: no PIC is described.
func (c Config) madt() []byte {
	b := le.AppendUint32(nil, uint32(c.LAPIC))
	b = le.AppendUint32(b, 0)
	b = append(b, madtIOAPIC, 12, uint8(c.CPUs), 0) // its id follows the CPUs'
	b = le.AppendUint32(b, uint32(c.IOAPIC))
	b = le.AppendUint32(b, 0) // first GSI
	for id := range c.CPUs {
		b = append(b, madtLAPIC, 8, uint8(id), uint8(id))
		b = le.AppendUint32(b, cpuEnabled)
	}
	return table("APIC", 5, b)
}
