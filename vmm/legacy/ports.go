// Package legacy holds what is left of the PC: a 16550A serial port whose output goes to a bounded log, the reset line of the
// keyboard controller, and the ACPI sleep register. Everything else on the I/O ports is absent and reads as all ones, as on a
// bus without a device. The package is a leaf.
package legacy

// The ports that exist.
const (
	SerialPort      = 0x3f8 // eight registers
	serialEnd       = SerialPort + serialRegisters
	keyboardPort    = 0x64
	keyboardReset   = 0xfe // pulse the CPU's reset line
	sleepEnable     = 1 << 5
	sleepTypeShift  = 2
	sleepTypeMask   = 7
	absent          = 0xff
	serialRegisters = 8
)

// Event is what a port write can ask of the machine.
type Event int

// Events of Ports.Out.
const (
	None Event = iota
	Reset
	PowerOff
)

// Ports is the I/O port space. Its methods are safe for concurrent use.
type Ports struct {
	Serial    *Serial // nil: no serial port
	SleepPort uint16  // ACPI sleep control register; the status register follows it
	SleepType uint8   // sleep type that means off
}

// In answers a read of one or more accesses of size bytes. It overwrites all of data.
func (p *Ports) In(port uint16, size int, data []byte) {
	for i := range data {
		data[i] = absent
	}
	for ; len(data) >= size && size > 0; data = data[size:] {
		switch {
		case p.Serial != nil && port >= SerialPort && port < serialEnd:
			data[0] = p.Serial.Read(port - SerialPort)
		case port == keyboardPort:
			data[0] = 0 // nothing to read and ready for a command: the kernel waits for the latter before a reset
		case port == p.SleepPort || port == p.SleepPort+1:
			data[0] = 0
		}
	}
}

// Out takes a write of one or more accesses of size bytes and says what it asks for.
func (p *Ports) Out(port uint16, size int, data []byte) Event {
	for ; len(data) >= size && size > 0; data = data[size:] {
		v := data[0]
		switch {
		case p.Serial != nil && port >= SerialPort && port < serialEnd:
			p.Serial.Write(port-SerialPort, v)
		case port == keyboardPort && v == keyboardReset:
			return Reset
		case port == p.SleepPort && v&sleepEnable != 0 && v>>sleepTypeShift&sleepTypeMask == p.SleepType:
			return PowerOff
		}
	}
	return None
}
