package acpi

// AML op codes, section 20.3.
const (
	opZero      = 0x00
	opOne       = 0x01
	opName      = 0x08
	opByte      = 0x0a
	opWord      = 0x0b
	opDWord     = 0x0c
	opString    = 0x0d
	opScope     = 0x10
	opBuffer    = 0x11
	opPackage   = 0x12
	opExtended  = 0x5b
	opExtDevice = 0x82
)

// Resource descriptors, section 6.4.
const (
	resIOPort      = 0x47 // small item 8, 7 bytes
	resEndTag      = 0x79 // small item 15, 1 byte
	resMemory32    = 0x86
	resInterrupt   = 0x89
	ioDecode16     = 1
	memReadWrite   = 1
	irqConsumer    = 1 << 0
	irqEdge        = 1 << 1
	noChecksumByte = 0
)

func name(segment string, value []byte) []byte {
	return append(append([]byte{opName}, segment...), value...)
}

func scope(segment string, body []byte) []byte {
	return append([]byte{opScope}, withLength(append([]byte(segment), body...))...)
}

func device(segment string, parts ...[]byte) []byte {
	body := []byte(segment)
	for _, p := range parts {
		body = append(body, p...)
	}
	return append([]byte{opExtended, opExtDevice}, withLength(body)...)
}

func amlString(s string) []byte { return append(append([]byte{opString}, s...), 0) }

func amlInteger(v uint32) []byte {
	switch {
	case v == 0:
		return []byte{opZero}
	case v == 1:
		return []byte{opOne}
	case v <= 0xff:
		return []byte{opByte, uint8(v)}
	case v <= 0xffff:
		return le.AppendUint16([]byte{opWord}, uint16(v))
	}
	return le.AppendUint32([]byte{opDWord}, v)
}

func amlPackage(elements ...[]byte) []byte {
	body := []byte{uint8(len(elements))}
	for _, e := range elements {
		body = append(body, e...)
	}
	return append([]byte{opPackage}, withLength(body)...)
}

func buffer(parts ...[]byte) []byte {
	var data []byte
	for _, p := range parts {
		data = append(data, p...)
	}
	return append([]byte{opBuffer}, withLength(append(amlInteger(uint32(len(data))), data...))...)
}

// withLength puts PkgLength (section 20.2.4) before body. The length counts its own bytes: one byte below 64; else the low
// nibble of the first byte and 8 bits of each that follows, whose number is in its top two bits.
func withLength(body []byte) []byte {
	n := len(body) + 1
	if n < 1<<6 {
		return append([]byte{uint8(n)}, body...)
	}
	more := 1
	for ; n+more >= 1<<(4+8*more); more++ {
	}
	n += more
	out := []byte{uint8(more<<6 | n&0xf)}
	for n >>= 4; more > 0; more-- {
		out = append(out, uint8(n))
		n >>= 8
	}
	return append(out, body...)
}

func memory32(base, size uint32) []byte {
	b := []byte{resMemory32, 9, 0, memReadWrite}
	return le.AppendUint32(le.AppendUint32(b, base), size)
}

func interrupt(gsi uint32) []byte {
	return le.AppendUint32([]byte{resInterrupt, 6, 0, irqConsumer | irqEdge, 1}, gsi)
}

func ioPorts(port uint16, n uint8) []byte {
	b := le.AppendUint16([]byte{resIOPort, ioDecode16}, port)
	return append(le.AppendUint16(b, port), 1, n)
}

func endTag() []byte { return []byte{resEndTag, noChecksumByte} }
