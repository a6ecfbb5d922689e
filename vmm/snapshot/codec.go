package snapshot

import "encoding/binary"

var le = binary.LittleEndian

// encoder appends little-endian values; strings and byte blocks carry a u32 length.
type encoder []byte

func (e *encoder) u8(v uint8)   { *e = append(*e, v) }
func (e *encoder) u32(v uint32) { *e = le.AppendUint32(*e, v) }
func (e *encoder) u64(v uint64) { *e = le.AppendUint64(*e, v) }

func (e *encoder) flag(v bool) {
	if v {
		e.u8(1)
	} else {
		e.u8(0)
	}
}

func (e *encoder) bytes(b []byte) {
	e.u32(uint32(len(b)))
	*e = append(*e, b...)
}

// decoder reads what encoder wrote. After the first value that is not there it yields zeros and failed is set.
type decoder struct {
	b      []byte
	failed bool
}

func (d *decoder) take(n int) []byte {
	if n < 0 || n > len(d.b) {
		d.b, d.failed = nil, true
		return nil
	}
	out := d.b[:n:n]
	d.b = d.b[n:]
	return out
}

func (d *decoder) u8() uint8 {
	if b := d.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (d *decoder) u32() uint32 {
	if b := d.take(4); b != nil {
		return le.Uint32(b)
	}
	return 0
}

func (d *decoder) u64() uint64 {
	if b := d.take(8); b != nil {
		return le.Uint64(b)
	}
	return 0
}

// flag accepts 0 and 1 only, so that a decoded file encodes to the same bytes.
func (d *decoder) flag() bool {
	v := d.u8()
	if v > 1 {
		d.failed = true
	}
	return v == 1
}

// bytes returns a block that aliases the input; empty is nil.
func (d *decoder) bytes() []byte {
	n := d.u32()
	if n == 0 {
		return nil
	}
	return d.take(int(n))
}

// count reads a number of elements of at least size bytes each, and refuses one the input cannot hold.
func (d *decoder) count(size int) int {
	n := int(d.u32())
	if n > len(d.b)/size {
		d.b, d.failed = nil, true
		return 0
	}
	return n
}

// done reports whether everything was there and nothing is left.
func (d *decoder) done() bool { return !d.failed && len(d.b) == 0 }
