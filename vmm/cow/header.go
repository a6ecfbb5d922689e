package cow

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"slices"
)

// BlockSize is the unit of a layer, in bytes.
const BlockSize = 4096

// MaxSize is the largest virtual size of a disk, in bytes: its map takes at most 64 MiB of memory.
const MaxSize = 1 << 40

// The header's layout; FORMAT.md is the specification.
const (
	magic       = "TORPCOW\n"
	version     = 2 // may be sealed
	oldVersion  = 1
	headerBytes = 4096
	headerUsed  = 36 // the rest is zero
	headerCRC   = 32
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// CorruptError is a layer that is not what FORMAT.md says.
type CorruptError struct {
	Path   string
	Part   string // header, map, file size, seal or data
	Detail string
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("disk layer %s: bad %s: %s", e.Path, e.Part, e.Detail)
}

// header is the first block of a layer.
type header struct {
	version     uint32
	virtualSize int64
}

func newHeader(virtualSize int64) (header, error) {
	if virtualSize < BlockSize || virtualSize > MaxSize || virtualSize%BlockSize != 0 {
		return header{}, fmt.Errorf("a disk of %d bytes is not a multiple of %d from %d to %d", virtualSize, BlockSize, BlockSize, MaxSize)
	}
	return header{version, virtualSize}, nil
}

func (h header) blocks() int64     { return h.virtualSize / BlockSize }
func (h header) mapSectors() int64 { return (h.blocks() + sectorBlocks - 1) / sectorBlocks }
func (h header) mapPages() int64   { return (h.mapSectors() + pageSectors - 1) / pageSectors }
func (h header) dataOffset() int64 { return headerBytes + h.mapPages()*BlockSize }

// fileSize is the size of a layer without a seal, and where the sums of one with a seal begin.
func (h header) fileSize() int64 { return h.dataOffset() + h.virtualSize }

// sumPages is how many blocks of sums a sealed layer has; the seal comes after them.
func (h header) sumPages() int64   { return (h.blocks() + pageSums - 1) / pageSums }
func (h header) sealOffset() int64 { return h.fileSize() + h.sumPages()*BlockSize }
func (h header) sealedSize() int64 { return h.sealOffset() + sealBytes }

func (h header) marshal() []byte {
	b := append(make([]byte, 0, headerBytes), magic...)
	b = binary.LittleEndian.AppendUint32(b, h.version)
	b = binary.LittleEndian.AppendUint32(b, BlockSize)
	b = binary.LittleEndian.AppendUint64(b, uint64(h.virtualSize))
	b = binary.LittleEndian.AppendUint64(b, uint64(h.dataOffset()))
	b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
	return b[:headerBytes]
}

// unmarshalHeader reads the first headerBytes of a layer. Its errors say what is wrong, without the path.
func unmarshalHeader(b []byte) (header, error) {
	if len(b) < headerBytes || string(b[:len(magic)]) != magic {
		return header{}, fmt.Errorf("this is not a disk layer")
	}
	v := binary.LittleEndian.Uint32(b[8:])
	if !slices.Contains([]uint32{oldVersion, version}, v) {
		return header{}, fmt.Errorf("version %d, this program reads %d and %d", v, oldVersion, version)
	}
	if crc32.Checksum(b[:headerCRC], castagnoli) != binary.LittleEndian.Uint32(b[headerCRC:]) {
		return header{}, fmt.Errorf("checksum differs")
	}
	size := binary.LittleEndian.Uint64(b[16:])
	h, err := newHeader(int64(min(size, MaxSize+1)))
	if err != nil {
		return header{}, err
	}
	h.version = v
	if bs := binary.LittleEndian.Uint32(b[12:]); bs != BlockSize {
		return header{}, fmt.Errorf("blocks of %d bytes", bs)
	}
	if binary.LittleEndian.Uint64(b[24:]) != uint64(h.dataOffset()) {
		return header{}, fmt.Errorf("data offset does not follow from the size")
	}
	if !isZero(b[headerUsed:headerBytes]) {
		return header{}, fmt.Errorf("reserved bytes are set")
	}
	return h, nil
}
