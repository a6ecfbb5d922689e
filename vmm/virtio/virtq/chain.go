package virtq

import (
	"encoding/binary"
	"errors"

	"torpor/vmm/guestmem"
)

// ErrShort means that a chain has fewer bytes than a request needs.
var ErrShort = errors.New("descriptor chain is too short")

// Chain is one request of the driver: bytes to read, then bytes to write, wherever the driver scattered them. The driver may
// change the bytes at any time; a Chain's own lengths never change. The zero value is for Pop to fill.
type Chain struct {
	Head     uint16 // names the chain in Push
	mem      *guestmem.Memory
	readable part
	writable part
}

// part is one direction of a chain.
type part struct {
	segments []segment
	bytes    uint64
}

type segment struct {
	at  guestmem.Addr
	len uint32
}

// ReadLen returns how many bytes the driver gives.
func (c *Chain) ReadLen() uint64 { return c.readable.bytes }

// WriteLen returns how many bytes the driver takes.
func (c *Chain) WriteLen() uint64 { return c.writable.bytes }

// ReadAt fills p from the driver's bytes at offset off. It fails with ErrShort or with a *guestmem.AccessError.
func (c *Chain) ReadAt(p []byte, off uint64) error {
	return c.readable.each(off, len(p), func(at guestmem.Addr, from, to int) error {
		return c.mem.ReadAt(p[from:to], at)
	})
}

// WriteAt copies p to the bytes the driver takes, at offset off. It fails with ErrShort or with a *guestmem.AccessError.
func (c *Chain) WriteAt(p []byte, off uint64) error {
	return c.writable.each(off, len(p), func(at guestmem.Addr, from, to int) error {
		return c.mem.WriteAt(p[from:to], at)
	})
}

// AppendReadable appends to dst the driver's bytes from offset off on, where they lie, for a system call to read: that reports a
// bad page as EFAULT. Empty pieces are left out. It fails with ErrShort or with a *guestmem.AccessError.
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
		b, err := c.mem.Slice(s.at+guestmem.Addr(off), uint64(s.len)-off)
		if err != nil {
			return dst, err
		}
		dst = append(dst, b)
		off = 0
	}
	return dst, nil
}

// each calls f for every contiguous piece of the n bytes at off: they are bytes from to to of the n.
func (p *part) each(off uint64, n int, f func(at guestmem.Addr, from, to int) error) error {
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
		if err := f(s.at+guestmem.Addr(off), done, done+piece); err != nil {
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

// walk reads the chain that starts at head into c.
func (q *Queue) walk(c *Chain, head uint16) error {
	c.Head, c.mem = head, q.mem
	c.readable.reset()
	c.writable.reset()
	next := head
	for range q.cfg.Size {
		if next >= q.cfg.Size {
			return q.breakf("descriptor %d of %d", next, q.cfg.Size)
		}
		var d [descBytes]byte
		if err := q.mem.ReadAt(d[:], q.cfg.Desc+descBytes*guestmem.Addr(next)); err != nil {
			return q.breakf("descriptor table: %w", err)
		}
		s := segment{guestmem.Addr(binary.LittleEndian.Uint64(d[0:])), binary.LittleEndian.Uint32(d[8:])}
		flags := binary.LittleEndian.Uint16(d[12:])
		switch {
		case flags&descIndirect != 0:
			return q.breakf("indirect descriptor, which was not offered")
		case flags&descWrite != 0:
			c.writable.add(s)
		case len(c.writable.segments) > 0:
			return q.breakf("readable descriptor after a writable one")
		default:
			c.readable.add(s)
		}
		if flags&descNext == 0 {
			return nil
		}
		next = binary.LittleEndian.Uint16(d[14:])
	}
	return q.breakf("descriptor chain from %d does not end", head)
}
