package machine

import (
	"torpor/vmm/acpi"
	"torpor/vmm/cow"
	"torpor/vmm/snapshot"
	"torpor/vmm/virtio/mmio"
	"torpor/vmm/x86"
)

const sleepTypeOff = acpi.SleepTypeOff

// addSlot puts a device into the next virtio slot.
func (m *Machine) addSlot(dev mmio.Device, u *undo) error {
	s, err := newSlot(m.vm, m.ram.mem, len(m.bus.slots), dev)
	if err != nil {
		return err
	}
	u.add(s.close)
	m.bus.slots = append(m.bus.slots, s)
	return nil
}

// shape is what a snapshot of the machine requires of its successor.
func (c Config) shape(disks []*cow.Chain) snapshot.Shape {
	s := snapshot.Shape{VCPUs: uint32(c.VCPUs), MemoryBytes: c.MemoryBytes, Console: c.Console != nil}
	if c.Vsock != nil {
		s.VsockCID = c.Vsock.CID
	}
	for i, d := range c.Disks {
		s.Disks = append(s.Disks, snapshot.Disk{ID: d.ID, Bytes: uint64(disks[i].Size()), ReadOnly: d.Top == nil})
	}
	return s
}

// tables describes the machine to the guest's ACPI interpreter.
func (m *Machine) tables() []byte {
	c := acpi.Config{
		Addr: x86.ACPIAddr, CPUs: len(m.vcpus), LAPIC: x86.LAPICAddr, IOAPIC: x86.IOAPICAddr,
		SleepCtl: x86.SleepCtlPort, SleepSts: x86.SleepStatPort, Reset: x86.I8042Port, ResetVal: x86.I8042Reset,
	}
	for i := range m.bus.slots {
		c.Virtio = append(c.Virtio, acpi.VirtioMMIO{Base: uint32(x86.MMIOAddr + i*x86.MMIOSlot), GSI: uint32(x86.VirtioGSI + i)})
	}
	if m.console != nil {
		c.UART = &acpi.UART{Port: x86.UARTPort, GSI: x86.UARTGSI}
	}
	return acpi.Build(c)
}
