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

// blkRequest is what a worker needs to do a request, kept for the next one.
type blkRequest struct {
	*virtq.Chain
	header [blkHeaderBytes]byte
	status [1]byte
	pieces [][]byte // of guest memory
}

// answer does one request. A request without room for a status cannot be answered and is given back as it is.
func (b *Block) answer(c *virtq.Chain) uint32 {
	if c.WriteLen() == 0 {
		return 0
	}
	r := b.requests.Get().(*blkRequest)
	r.Chain = c
	defer func() {
		r.Chain = nil
		clear(r.pieces[:cap(r.pieces)]) // it is not to hold on to guest memory
		r.pieces = r.pieces[:0]
		b.requests.Put(r)
	}()
	room := c.WriteLen() - 1
	written, err := b.do(r, room)
	switch {
	case err == nil:
		r.status[0] = blkOK
	case errors.Is(err, errBlkUnsupported):
		r.status[0] = blkUnsupported
	default:
		r.status[0] = blkIOError
	}
	if c.WriteAt(r.status[:], room) != nil || written != room {
		return uint32(written)
	}
	return uint32(room + 1)
}

// do carries out a request and returns how many of the driver's bytes, room of them before the status, it wrote.
func (b *Block) do(r *blkRequest, room uint64) (uint64, error) {
	if err := r.ReadAt(r.header[:], 0); err != nil {
		return 0, err
	}
	sector := binary.LittleEndian.Uint64(r.header[8:])
	switch binary.LittleEndian.Uint32(r.header[0:]) {
	case blkIn:
		return b.read(r, sector, room)
	case blkOut:
		return 0, b.write(r, sector)
	case blkTypeFlush:
		return 0, b.disk.Flush()
	case blkGetID:
		n := min(room, blkIDBytes)
		return n, r.WriteAt(b.id[:n], 0)
	case blkTypeDiscard:
		return 0, b.zero(r.Chain, 0)
	case blkTypeWriteZero:
		return 0, b.zero(r.Chain, blkUnmap)
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

func (b *Block) read(r *blkRequest, sector, n uint64) (uint64, error) {
	at, err := b.span(sector, n, blkMaxBytes)
	if err != nil {
		return 0, err
	}
	if r.pieces, err = r.AppendWritable(r.pieces, 0); err != nil {
		return 0, err
	}
	if err := b.disk.ReadV(withoutStatus(r.pieces), at, clearGuest); err != nil {
		return 0, err
	}
	return n, nil
}

func (b *Block) write(r *blkRequest, sector uint64) error {
	at, err := b.span(sector, r.ReadLen()-blkHeaderBytes, blkMaxBytes)
	if err != nil {
		return err
	}
	if b.readOnly {
		return errBlkRequest
	}
	if r.pieces, err = r.AppendReadable(r.pieces, blkHeaderBytes); err != nil {
		return err
	}
	if err := b.disk.WriteV(r.pieces, at); err != nil {
		return err
	}
	return b.writeThrough()
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
