package acpi

import "fmt"

// dsdt returns the differentiated description table: the name space with the devices and the S5 object.
func (c Config) dsdt() []byte {
	var devices []byte
	for i, d := range c.Virtio {
		devices = append(devices, device(fmt.Sprintf("VR%02X", i),
			name("_HID", amlString("LNRO0005")), // virtio-mmio, as Linux and QEMU know it
			name("_UID", amlInteger(uint32(i))),
			name("_CCA", amlInteger(1)), // cache-coherent
			name("_CRS", buffer(memory32(d.Base, 0x1000), interrupt(d.GSI), endTag())),
		)...)
	}
	if c.UART != nil {
		devices = append(devices, device("COM1",
			name("_HID", amlInteger(eisaID("PNP0501"))),
			name("_UID", amlInteger(0)),
			name("_CRS", buffer(ioPorts(c.UART.Port, 8), interrupt(c.UART.GSI), endTag())),
		)...)
	}
	body := scope("_SB_", devices)
	body = append(body, name("_S5_", amlPackage(amlInteger(SleepTypeOff), amlInteger(SleepTypeOff)))...)
	return table("DSDT", 2, body)
}

// eisaID packs an EISA id as ASL's EisaId does (section 19.3.4): three letters of 5 bits, four hex digits, bytes swapped.
func eisaID(id string) uint32 {
	var v uint32
	for _, letter := range id[:3] {
		v = v<<5 | uint32(letter-'@')
	}
	for _, digit := range id[3:7] {
		switch {
		case digit <= '9':
			v = v<<4 | uint32(digit-'0')
		default:
			v = v<<4 | uint32(digit-'A'+10)
		}
	}
	return v>>24 | v>>8&0xff00 | v<<8&0xff0000 | v<<24
}
