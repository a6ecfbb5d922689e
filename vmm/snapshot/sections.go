package snapshot

// The payloads of the sections, each an encode and a decode side by side: FORMAT.md in code.

func (s Shape) encode() (e encoder) {
	e.u32(s.VCPUs)
	e.u64(s.MemoryBytes)
	e.flag(s.Console)
	e.u64(s.VsockCID)
	e.u32(uint32(len(s.Disks)))
	for _, d := range s.Disks {
		e.bytes([]byte(d.ID))
		e.u64(d.Bytes)
		e.flag(d.ReadOnly)
	}
	return e
}

func (s *Shape) decode(d *decoder) {
	s.VCPUs = d.u32()
	s.MemoryBytes = d.u64()
	s.Console = d.flag()
	s.VsockCID = d.u64()
	for range d.count(13) {
		s.Disks = append(s.Disks, Disk{ID: string(d.bytes()), Bytes: d.u64(), ReadOnly: d.flag()})
	}
}

func (c CPU) encode() (e encoder) {
	e.bytes([]byte(c.Vendor))
	e.u32(c.XSaveBytes)
	e.u32(uint32(len(c.Features)))
	for _, f := range c.Features {
		e.u32(f.Leaf)
		e.u32(f.Index)
		e.u8(uint8(f.Register))
		e.u32(f.Bits)
	}
	if c.Template != "" {
		e.bytes([]byte(c.Template))
	}
	return e
}

func (c *CPU) decode(d *decoder) {
	c.Vendor = string(d.bytes())
	c.XSaveBytes = d.u32()
	for range d.count(13) {
		f := Features{Leaf: d.u32(), Index: d.u32(), Register: Register(d.u8()), Bits: d.u32()}
		if f.Register > EDX {
			d.failed = true
		}
		c.Features = append(c.Features, f)
	}
	if len(d.b) > 0 {
		c.Template = string(d.bytes())
		d.failed = d.failed || c.Template == ""
	}
}

func (m Memory) encode() (e encoder) {
	e.u8(uint8(m.Kind))
	e.u32(uint32(len(m.Sums)))
	for _, sum := range m.Sums {
		e.u32(sum)
	}
	return append(e, m.Top[:]...)
}

func (m *Memory) decode(d *decoder, version uint32) {
	m.Kind = MemoryKind(d.u8())
	n := d.count(4)
	m.Sums = make([]uint32, 0, n)
	for range n {
		m.Sums = append(m.Sums, d.u32())
	}
	if version > 1 {
		copy(m.Top[:], d.take(len(m.Top)))
	}
}

func (h Host) encode() (e encoder) {
	e.bytes([]byte(h.Kernel))
	e.bytes([]byte(h.KVM))
	return e
}

func (h *Host) decode(d *decoder) { h.Kernel, h.KVM = string(d.bytes()), string(d.bytes()) }

func (s *State) encodeVM() (e encoder) {
	e.u64(s.Clock)
	e.u32(uint32(len(s.IRQChips)))
	for _, c := range s.IRQChips {
		e.bytes(c)
	}
	return e
}

func (s *State) decodeVM(d *decoder) {
	s.Clock = d.u64()
	for range d.count(4) {
		s.IRQChips = append(s.IRQChips, d.bytes())
	}
}

// blocks lists the byte blocks of a vCPU in file order.
func (v *VCPU) blocks() []*[]byte {
	return []*[]byte{&v.Regs, &v.Sregs, &v.XSave, &v.XCRs, &v.DebugRegs, &v.LAPIC, &v.Events, &v.CPUID}
}

func (v *VCPU) encode() (e encoder) {
	e.u32(v.MPState)
	e.u32(v.TSCKHz)
	for _, b := range v.blocks() {
		e.bytes(*b)
	}
	e.u32(uint32(len(v.MSRs)))
	for _, m := range v.MSRs {
		e.u32(m.Index)
		e.u64(m.Data)
	}
	return e
}

func (v *VCPU) decode(d *decoder) {
	v.MPState = d.u32()
	v.TSCKHz = d.u32()
	for _, b := range v.blocks() {
		*b = d.bytes()
	}
	for range d.count(12) {
		v.MSRs = append(v.MSRs, MSR{Index: d.u32(), Data: d.u64()})
	}
}

func (s *State) encodeDevices() (e encoder) {
	e.u32(uint32(len(s.Devices)))
	for _, dev := range s.Devices {
		e.bytes([]byte(dev.Name))
		e.bytes(dev.Data)
	}
	return e
}

func (s *State) decodeDevices(d *decoder) {
	for range d.count(8) {
		s.Devices = append(s.Devices, Device{Name: string(d.bytes()), Data: d.bytes()})
	}
}
