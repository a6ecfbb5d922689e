package virtio

import (
	"encoding/binary"
	"errors"

	"torpor/vmm/guestmem"
	"torpor/vmm/virtio/virtq"
)

// Request types of a block device (virtio 1.2, section 5.2.6).
const (
	blkIn            = 0
	blkOut           = 1
	blkTypeFlush     = 4
	blkGetID         = 8
	blkTypeDiscard   = 11
	blkTypeWriteZero = 13
)

// Request status.
const (
	blkOK          = 0
	blkIOError     = 1
	blkUnsupported = 2
)

const (
	blkHeaderBytes = 16
	blkRangeBytes  = 16
)

var (
	errBlkRequest     = errors.New("malformed block request")
	errBlkUnsupported = errors.New("unsupported block request")
)

// answer does one request. A request without room for a status cannot be answered and is given back as it is.
func (b *Block) answer(c *virtq.Chain) uint32 {
	if c.WriteLen() == 0 {
		return 0
	}
	room := c.WriteLen() - 1
	written, err := b.do(c, room)
	status := byte(blkOK)
	switch {
	case errors.Is(err, errBlkUnsupported):
		status = blkUnsupported
	case err != nil:
		status = blkIOError
	}
	if c.WriteAt([]byte{status}, room) != nil || written != room {
		return uint32(written)
	}
	return uint32(room + 1)
}

// do carries out a request and returns how many of the driver's bytes, room of them before the status, it wrote.
func (b *Block) do(c *virtq.Chain, room uint64) (uint64, error) {
	var header [blkHeaderBytes]byte
	if err := c.ReadAt(header[:], 0); err != nil {
		return 0, err
	}
	sector := binary.LittleEndian.Uint64(header[8:])
	switch binary.LittleEndian.Uint32(header[0:]) {
	case blkIn:
		return b.read(c, sector, room)
	case blkOut:
		return 0, b.write(c, sector)
	case blkTypeFlush:
		return 0, b.disk.Flush()
	case blkGetID:
		n := min(room, blkIDBytes)
		return n, c.WriteAt(b.id[:n], 0)
	case blkTypeDiscard:
		return 0, b.zero(c, 0)
	case blkTypeWriteZero:
		return 0, b.zero(c, blkUnmap)
	}
	return 0, errBlkUnsupported
}

// span checks a request for n bytes at a sector and returns the offset of its first byte on the disk.
func (b *Block) span(sector, n, most uint64) (int64, error) {
	sectors := uint64(b.disk.Size()) / sectorBytes
	if n%sectorBytes != 0 || n > most || sector > sectors || n/sectorBytes > sectors-sector {
		return 0, errBlkRequest
	}
	return int64(sector * sectorBytes), nil
}

func (b *Block) read(c *virtq.Chain, sector, n uint64) (uint64, error) {
	at, err := b.span(sector, n, blkMaxBytes)
	if err != nil {
		return 0, err
	}
	pieces, release := b.gather()
	defer release()
	if pieces, err = c.AppendWritable(pieces, 0); err != nil {
		return 0, err
	}
	if err := b.disk.ReadV(withoutStatus(pieces), at, clearGuest); err != nil {
		return 0, err
	}
	return n, nil
}

func (b *Block) write(c *virtq.Chain, sector uint64) error {
	at, err := b.span(sector, c.ReadLen()-blkHeaderBytes, blkMaxBytes)
	if err != nil {
		return err
	}
	if b.readOnly {
		return errBlkRequest
	}
	pieces, release := b.gather()
	defer release()
	if pieces, err = c.AppendReadable(pieces, blkHeaderBytes); err != nil {
		return err
	}
	if err := b.disk.WriteV(pieces, at); err != nil {
		return err
	}
	return b.writeThrough()
}

// gather returns an empty slice for the pieces of a request, and what gives it back. It is not to hold on to guest memory.
func (b *Block) gather() (pieces [][]byte, release func()) {
	p := b.pieces.Get().(*[][]byte)
	return (*p)[:0], func() {
		clear((*p)[:cap(*p)])
		b.pieces.Put(p)
	}
}

// withoutStatus takes the last byte of the writable part away: there is one.
func withoutStatus(pieces [][]byte) [][]byte {
	last := &pieces[len(pieces)-1]
	*last = (*last)[:len(*last)-1]
	return pieces
}

// clearGuest clears a piece of guest memory.
func clearGuest(p []byte) error {
	if !guestmem.Guard(p, func() { clear(p) }) {
		return guestmem.ErrFault
	}
	return nil
}

// writeThrough makes a write durable for a driver that will not flush.
func (b *Block) writeThrough() error {
	if b.features&blkFlush != 0 {
		return nil
	}
	return b.disk.Flush()
}

// blkUnmap is the flag of a range that lets write-zeroes give its room back. A discard always does, and has no flags.
const blkUnmap = 1

// zero does a discard or write-zeroes request: ranges of {sector u64, sectors u32, flags u32}, of which only the given flags
// are known. All ranges are judged before any is touched.
func (b *Block) zero(c *virtq.Chain, known uint32) error {
	if b.readOnly {
		return errBlkUnsupported
	}
	n := c.ReadLen() - blkHeaderBytes
	if n == 0 || n%blkRangeBytes != 0 || n > blkMaxRanges*blkRangeBytes {
		return errBlkRequest
	}
	var raw [blkMaxRanges * blkRangeBytes]byte
	if err := c.ReadAt(raw[:n], blkHeaderBytes); err != nil {
		return err
	}
	type span struct {
		at, bytes int64
		zero      func(off, n int64) error
	}
	spans := make([]span, 0, blkMaxRanges)
	for r := raw[:n]; len(r) > 0; r = r[blkRangeBytes:] {
		flags := binary.LittleEndian.Uint32(r[12:])
		if flags&^known != 0 {
			return errBlkUnsupported
		}
		bytes := uint64(binary.LittleEndian.Uint32(r[8:])) * sectorBytes
		at, err := b.span(binary.LittleEndian.Uint64(r), bytes, blkMaxDiscard*sectorBytes)
		if err != nil {
			return err
		}
		one := span{at, int64(bytes), b.disk.Discard}
		if known != 0 && flags&blkUnmap == 0 {
			one.zero = b.disk.Zero
		}
		spans = append(spans, one)
	}
	for _, s := range spans {
		if err := s.zero(s.at, s.bytes); err != nil {
			return err
		}
	}
	return b.writeThrough()
}
