package virtio

import (
	"encoding/binary"
	"errors"

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
func (b *Block) answer(c *virtq.Chain, buf []byte) uint32 {
	if c.WriteLen() == 0 {
		return 0
	}
	room := c.WriteLen() - 1
	written, err := b.do(c, room, buf)
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
func (b *Block) do(c *virtq.Chain, room uint64, buf []byte) (uint64, error) {
	var header [blkHeaderBytes]byte
	if err := c.ReadAt(header[:], 0); err != nil {
		return 0, err
	}
	sector := binary.LittleEndian.Uint64(header[8:])
	switch binary.LittleEndian.Uint32(header[0:]) {
	case blkIn:
		return b.read(c, sector, room, buf)
	case blkOut:
		return 0, b.write(c, sector, buf)
	case blkTypeFlush:
		return 0, b.disk.Flush()
	case blkGetID:
		n := min(room, blkIDBytes)
		return n, c.WriteAt(b.id[:n], 0)
	case blkTypeDiscard:
		return 0, b.zero(c, 0)
	case blkTypeWriteZero:
		const unmap = 1
		return 0, b.zero(c, unmap)
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

func (b *Block) read(c *virtq.Chain, sector, n uint64, buf []byte) (uint64, error) {
	at, err := b.span(sector, n, blkMaxBytes)
	if err != nil {
		return 0, err
	}
	for done := uint64(0); done < n; {
		piece := buf[:min(uint64(len(buf)), n-done)]
		if _, err := b.disk.ReadAt(piece, at+int64(done)); err != nil {
			return done, err
		}
		if err := c.WriteAt(piece, done); err != nil {
			return done, err
		}
		done += uint64(len(piece))
	}
	return n, nil
}

func (b *Block) write(c *virtq.Chain, sector uint64, buf []byte) error {
	n := c.ReadLen() - blkHeaderBytes
	at, err := b.span(sector, n, blkMaxBytes)
	if err != nil {
		return err
	}
	if b.readOnly {
		return errBlkRequest
	}
	for done := uint64(0); done < n; {
		piece := buf[:min(uint64(len(buf)), n-done)]
		if err := c.ReadAt(piece, blkHeaderBytes+done); err != nil {
			return err
		}
		if _, err := b.disk.WriteAt(piece, at+int64(done)); err != nil {
			return err
		}
		done += uint64(len(piece))
	}
	return b.writeThrough()
}

// writeThrough makes a write durable for a driver that will not flush.
func (b *Block) writeThrough() error {
	if b.features&blkFlush != 0 {
		return nil
	}
	return b.disk.Flush()
}

// zero does a discard or write-zeroes request: ranges of {sector u64, sectors u32, flags u32}, of the given flags only.
func (b *Block) zero(c *virtq.Chain, flags uint32) error {
	if b.readOnly {
		return errBlkUnsupported
	}
	n := c.ReadLen() - blkHeaderBytes
	if n == 0 || n%blkRangeBytes != 0 || n > blkMaxRanges*blkRangeBytes {
		return errBlkRequest
	}
	for at := uint64(blkHeaderBytes); at < c.ReadLen(); at += blkRangeBytes {
		var r [blkRangeBytes]byte
		if err := c.ReadAt(r[:], at); err != nil {
			return err
		}
		if binary.LittleEndian.Uint32(r[12:])&^flags != 0 {
			return errBlkUnsupported
		}
		bytes := uint64(binary.LittleEndian.Uint32(r[8:])) * sectorBytes
		off, err := b.span(binary.LittleEndian.Uint64(r[0:]), bytes, blkMaxDiscard*sectorBytes)
		if err != nil {
			return err
		}
		if err := b.disk.Discard(off, int64(bytes)); err != nil {
			return err
		}
	}
	return b.writeThrough()
}
