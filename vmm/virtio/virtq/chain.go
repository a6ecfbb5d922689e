package virtq

import (
	"encoding/binary"
	"errors"
)

// ErrShort means that a chain has fewer bytes than a request needs.
var ErrShort = errors.New("descriptor chain is too short")

// Chain is one request of the driver: bytes to read, then bytes to write, wherever the driver scattered them. The driver may
// change the bytes at any time; a Chain's own lengths never change. The zero value is for Pop to fill.
type Chain struct {
	Head     uint16 // names the chain in Push
	mem      Memory
	readable part
	writable part
}

// part is one direction of a chain.
type part struct {
	segments []segment
	bytes    uint64
}

// segment is what one descriptor describes. Whether it is RAM is seen when it is used.
type segment struct {
	addr uint64
	len  uint32
}

// ReadLen returns how many bytes the driver gives.
func (c *Chain) ReadLen() uint64 { return c.readable.bytes }

// WriteLen returns how many bytes the driver takes.
func (c *Chain) WriteLen() uint64 { return c.writable.bytes }

// ReadAt fills p from the driver's bytes at offset off. It fails with ErrShort or with the Memory's error.
func (c *Chain) ReadAt(p []byte, off uint64) error {
	return c.readable.each(off, len(p), func(addr uint64, from, to int) error {
		return c.mem.ReadAt(p[from:to], addr)
	})
}

// WriteAt copies p to the bytes the driver takes, at offset off. It fails with ErrShort or with the Memory's error.
func (c *Chain) WriteAt(p []byte, off uint64) error {
	return c.writable.each(off, len(p), func(addr uint64, from, to int) error {
		return c.mem.WriteAt(p[from:to], addr)
	})
}

// Writable calls f for every descriptor the driver takes, with its guest physical address and length in bytes: for a request about
// the memory itself, not its contents. Neither is checked against RAM.
func (c *Chain) Writable(f func(addr uint64, n uint32)) {
	for _, s := range c.writable.segments {
		f(s.addr, s.len)
	}
}

// AppendReadable appends to dst the driver's bytes from offset off on, where they lie, for a system call to read: that reports a
// bad page as EFAULT. Empty pieces are left out. It fails with ErrShort or with the Memory's error.
func (c *Chain) AppendReadable(dst [][]byte, off uint64) ([][]byte, error) {
	return c.appendSlices(dst, &c.readable, off)
}

// AppendWritable is AppendReadable for the bytes the driver takes, for a system call to write.
func (c *Chain) AppendWritable(dst [][]byte, off uint64) ([][]byte, error) {
	return c.appendSlices(dst, &c.writable, off)
}

func (c *Chain) appendSlices(dst [][]byte, p *part, off uint64) ([][]byte, error) {
	if off > p.bytes {
		return dst, ErrShort
	}
	for _, s := range p.segments {
		if off >= uint64(s.len) {
			off -= uint64(s.len)
			continue
		}
		b, err := c.mem.Slice(s.addr+off, uint64(s.len)-off)
		if err != nil {
			return dst, err
		}
		dst = append(dst, b)
		off = 0
	}
	return dst, nil
}

// each calls f for every contiguous piece of the n bytes at off: they are bytes from to to of the n. An address that wraps around is
// no RAM for any Memory.
func (p *part) each(off uint64, n int, f func(addr uint64, from, to int) error) error {
	if off > p.bytes || uint64(n) > p.bytes-off {
		return ErrShort
	}
	done := 0
	for _, s := range p.segments {
		if done == n {
			break
		}
		if off >= uint64(s.len) {
			off -= uint64(s.len)
			continue
		}
		piece := int(min(uint64(s.len)-off, uint64(n-done)))
		if err := f(s.addr+off, done, done+piece); err != nil {
			return err
		}
		done += piece
		off = 0
	}
	return nil
}

func (p *part) reset() { p.segments, p.bytes = p.segments[:0], 0 }

func (p *part) add(s segment) {
	p.segments = append(p.segments, s)
	p.bytes += uint64(s.len)
}

// walk reads the chain that starts at head into c. A chain longer than the table has a loop (section 2.7.5.2).
func (q *Queue) walk(c *Chain, head uint16) error {
	c.Head, c.mem = head, q.mem
	c.readable.reset()
	c.writable.reset()
	next := head
	for range q.cfg.Size {
		if next >= q.cfg.Size {
			return q.breakf("descriptor %d of %d", next, q.cfg.Size)
		}
		raw := q.scratch[:descBytes]
		if err := q.mem.ReadAt(raw, q.cfg.Desc+descBytes*uint64(next)); err != nil {
			return q.breakf("descriptor table: %w", err)
		}
		d := parseDescriptor(raw)
		if d.flags&descIndirect != 0 {
			return q.walkTable(c, d)
		}
		if err := q.add(c, d); err != nil {
			return err
		}
		if d.flags&descNext == 0 {
			return nil
		}
		next = d.next
	}
	return q.breakf("descriptor chain from %d does not end", head)
}

// walkTable goes on with the chain in the table of its own that d, the last descriptor of the queue's table, refers to (section
// 2.7.5.3). It begins with the table's first and is no longer than the queue. The table is copied at once.
func (q *Queue) walkTable(c *Chain, d descriptor) error {
	n := d.len / descBytes
	switch {
	case !q.features.Indirect:
		return q.breakf("indirect descriptor, which was not negotiated")
	case d.flags&descNext != 0:
		return q.breakf("indirect descriptor with another after it")
	case n == 0 || d.len%descBytes != 0 || n > uint32(q.cfg.Size):
		return q.breakf("indirect table of %d bytes", d.len)
	}
	if q.table == nil {
		q.table = make([]byte, descBytes*int(q.cfg.Size))
	}
	table := q.table[:d.len]
	if err := q.mem.ReadAt(table, d.addr); err != nil {
		return q.breakf("indirect table: %w", err)
	}
	next := uint32(0)
	for range n {
		if next >= n {
			return q.breakf("descriptor %d of an indirect table of %d", next, n)
		}
		d := parseDescriptor(table[descBytes*next:])
		if d.flags&descIndirect != 0 {
			return q.breakf("indirect descriptor in an indirect table")
		}
		if err := q.add(c, d); err != nil {
			return err
		}
		if d.flags&descNext == 0 {
			return nil
		}
		next = uint32(d.next)
	}
	return q.breakf("indirect descriptor chain does not end")
}

// add puts what d describes at the end of its part of c.
func (q *Queue) add(c *Chain, d descriptor) error {
	switch {
	case d.flags&descWrite != 0:
		c.writable.add(d.segment)
	case len(c.writable.segments) > 0:
		return q.breakf("readable descriptor after a writable one")
	default:
		c.readable.add(d.segment)
	}
	return nil
}

// descriptor is struct vring_desc.
type descriptor struct {
	segment
	flags, next uint16
}

func parseDescriptor(raw []byte) descriptor {
	le := binary.LittleEndian
	return descriptor{
		segment: segment{le.Uint64(raw[descAddr:]), le.Uint32(raw[descLen:])},
		flags:   le.Uint16(raw[descFlags:]), next: le.Uint16(raw[descNextField:]),
	}
}
