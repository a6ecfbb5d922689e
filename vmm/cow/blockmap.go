package cow

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
)

// blockState is what a block is in one layer.
type blockState byte

const (
	absent  blockState = 0 // look in the layer below
	data    blockState = 1
	zero    blockState = 2
	invalid blockState = 3
)

// The map on disk: sectors of two bits a block, each with its own checksum.
const (
	sectorBytes   = 512
	sectorPayload = sectorBytes - 4
	sectorBlocks  = sectorPayload * perByte
	perByte       = 4
)

// blockMap is the map of one layer in memory: the payloads of its sectors, one after the other.
// It is not safe for concurrent use.
type blockMap struct {
	blocks int64
	bits   []byte
	dirty  map[int64]struct{} // sectors that differ from the file, by number
}

func newBlockMap(h header) *blockMap {
	return &blockMap{blocks: h.blocks(), bits: make([]byte, h.mapSectors()*sectorPayload), dirty: map[int64]struct{}{}}
}

func (m *blockMap) get(b int64) blockState {
	return blockState(m.bits[b/perByte] >> (2 * (b % perByte)) & 3)
}

// run returns the state of block b and how many blocks from b on, at most limit, have it too.
// Preconditions: b+limit <= blocks, limit > 0.
func (m *blockMap) run(b, limit int64) (blockState, int64) {
	s := m.get(b)
	whole := byte(s) * 0x55
	n := int64(1)
	for n < limit {
		at := b + n
		switch {
		case at%perByte == 0 && limit-n >= perByte && m.bits[at/perByte] == whole:
			n += perByte
		case m.get(at) == s:
			n++
		default:
			return s, n
		}
	}
	return s, n
}

// set gives n blocks from b on the state s.
func (m *blockMap) set(b, n int64, s blockState) {
	for ; n > 0; b, n = b+1, n-1 {
		shift := 2 * (b % perByte)
		at := &m.bits[b/perByte]
		if was := *at; was>>shift&3 != byte(s) {
			*at = was&^(3<<shift) | byte(s)<<shift
			m.dirty[b/sectorBlocks] = struct{}{}
		}
	}
}

// sector returns sector i as it is on disk.
func (m *blockMap) sector(i int64) []byte {
	payload := m.bits[i*sectorPayload : (i+1)*sectorPayload]
	out := append(make([]byte, 0, sectorBytes), payload...)
	return binary.LittleEndian.AppendUint32(out, crc32.Checksum(payload, castagnoli))
}

// load takes all sectors as they are on disk.
func (m *blockMap) load(raw []byte) error {
	for i := int64(0); len(raw) >= sectorBytes && i*sectorPayload < int64(len(m.bits)); i++ {
		sector := raw[:sectorBytes]
		raw = raw[sectorBytes:]
		if isZero(sector) {
			continue
		}
		payload := sector[:sectorPayload]
		if crc32.Checksum(payload, castagnoli) != binary.LittleEndian.Uint32(sector[sectorPayload:]) {
			return fmt.Errorf("checksum of sector %d differs", i)
		}
		copy(m.bits[i*sectorPayload:], payload)
	}
	if !isZero(raw) {
		return errors.New("padding is set")
	}
	for i, b := range m.bits {
		if b&(b>>1)&0x55 != 0 {
			return fmt.Errorf("a block near %d has no valid state", i*perByte)
		}
	}
	for b := m.blocks; b < int64(len(m.bits))*perByte; b++ {
		if m.get(b) != absent {
			return errors.New("a block past the end is set")
		}
	}
	return nil
}

// count returns how many blocks have the state s.
func (m *blockMap) count(s blockState) int64 {
	var n int64
	for b := int64(0); b < m.blocks; {
		got, run := m.run(b, m.blocks-b)
		if got == s {
			n += run
		}
		b += run
	}
	return n
}

var zeros [BlockSize]byte

// isZero reports whether all of b is zero, of any length.
func isZero(b []byte) bool {
	for len(b) > len(zeros) {
		if !bytes.Equal(b[:len(zeros)], zeros[:]) {
			return false
		}
		b = b[len(zeros):]
	}
	return bytes.Equal(b, zeros[:len(b)])
}
