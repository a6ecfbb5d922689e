package cow

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math/bits"
)

// blockState is what a block is in one layer.
type blockState byte

const (
	absent  blockState = 0 // look in the layer below
	data    blockState = 1
	zero    blockState = 2
	invalid blockState = 3
)

// The map on disk: sectors of two bits a block, each with its own checksum. It is written by pages of 4096 bytes, as the
// kernel would.
const (
	sectorBytes   = 512
	sectorPayload = sectorBytes - 4
	sectorBlocks  = sectorPayload * perByte
	perByte       = 4
	pageSectors   = BlockSize / sectorBytes
)

// blockMap is the map of one layer in memory: the payloads of its sectors, nil where no block is in the layer.
// It is not safe for concurrent use.
type blockMap struct {
	blocks  int64
	sectors []*[sectorPayload]byte
	dirty   []uint64 // a bit for each page of the file that differs from this
}

func newBlockMap(h header) *blockMap {
	return &blockMap{blocks: h.blocks(), sectors: make([]*[sectorPayload]byte, h.mapSectors()), dirty: make([]uint64, (h.mapPages()+63)/64)}
}

func (m *blockMap) get(b int64) blockState {
	s := m.sectors[b/sectorBlocks]
	if s == nil {
		return absent
	}
	b %= sectorBlocks
	return blockState(s[b/perByte] >> (2 * (b % perByte)) & 3)
}

// run returns the state of block b and how many blocks from b on, at most limit, have it too.
// Preconditions: b+limit <= blocks, limit > 0.
func (m *blockMap) run(b, limit int64) (blockState, int64) {
	s := m.get(b)
	whole := byte(s) * 0x55
	for n := int64(0); ; {
		in := (b + n) % sectorBlocks
		end := n + sectorBlocks - in // of the sector
		if payload := m.sectors[(b+n)/sectorBlocks]; payload != nil {
			for n < min(end, limit) {
				at := (b + n) % sectorBlocks
				switch {
				case at%perByte == 0 && payload[at/perByte] == whole:
					n += perByte
				case blockState(payload[at/perByte]>>(2*(at%perByte))&3) == s:
					n++
				default:
					return s, n
				}
			}
		} else if s != absent {
			return s, n
		}
		if n = end; n >= limit {
			return s, limit
		}
	}
}

// set gives n blocks from b on the state s, which is not absent.
func (m *blockMap) set(b, n int64, s blockState) {
	for n > 0 {
		i, in := b/sectorBlocks, b%sectorBlocks
		piece := min(n, sectorBlocks-in)
		if m.sectors[i] == nil {
			m.sectors[i] = new([sectorPayload]byte)
		}
		if setBits(m.sectors[i], in, piece, s) {
			m.markDirty(i / pageSectors)
		}
		b, n = b+piece, n-piece
	}
}

// setBits sets the state of n blocks from in on within a sector and reports whether anything changed.
func setBits(payload *[sectorPayload]byte, in, n int64, s blockState) (changed bool) {
	whole := byte(s) * 0x55
	for ; n > 0; in, n = in+1, n-1 {
		at := &payload[in/perByte]
		if in%perByte == 0 && n >= perByte {
			changed = changed || *at != whole
			*at = whole
			in, n = in+perByte-1, n-perByte+1
			continue
		}
		shift := 2 * (in % perByte)
		was := *at
		*at = was&^(3<<shift) | byte(s)<<shift
		changed = changed || *at != was
	}
	return changed
}

func (m *blockMap) markDirty(page int64) { m.dirty[page/64] |= 1 << (page % 64) }

// takeDirty returns the number of the first dirty page at or after page, whose mark it takes away; false if there is none.
func (m *blockMap) takeDirty(page int64) (int64, bool) {
	for w := page / 64; w < int64(len(m.dirty)); w++ {
		word := m.dirty[w]
		if w == page/64 {
			word &= ^uint64(0) << (page % 64)
		}
		if word != 0 {
			bit := bits.TrailingZeros64(word)
			m.dirty[w] &^= 1 << bit
			return w*64 + int64(bit), true
		}
	}
	return 0, false
}

// appendPage appends a page of the map as it is on disk.
func (m *blockMap) appendPage(out []byte, page int64) []byte {
	var empty [sectorBytes]byte
	for i := page * pageSectors; i < (page+1)*pageSectors; i++ {
		if i >= int64(len(m.sectors)) || m.sectors[i] == nil {
			out = append(out, empty[:]...)
			continue
		}
		out = append(out, m.sectors[i][:]...)
		out = binary.LittleEndian.AppendUint32(out, crc32.Checksum(m.sectors[i][:], castagnoli))
	}
	return out
}

// load takes raw, whole sectors as they are on disk, for the sectors from first on; what lies past the last is padding.
func (m *blockMap) load(first int64, raw []byte) error {
	for i := first; len(raw) >= sectorBytes; i, raw = i+1, raw[sectorBytes:] {
		sector := raw[:sectorBytes]
		if isZero(sector) {
			continue
		}
		if i >= int64(len(m.sectors)) {
			return errors.New("padding is set")
		}
		payload := [sectorPayload]byte(sector)
		if crc32.Checksum(payload[:], castagnoli) != binary.LittleEndian.Uint32(sector[sectorPayload:]) {
			return fmt.Errorf("checksum of sector %d differs", i)
		}
		for at, b := range payload {
			if b&(b>>1)&0x55 != 0 {
				return fmt.Errorf("a block near %d has no valid state", i*sectorBlocks+int64(at)*perByte)
			}
		}
		m.sectors[i] = &payload
	}
	for b := m.blocks; b < int64(len(m.sectors))*sectorBlocks; b++ {
		if m.get(b) != absent {
			return errors.New("a block past the end is set")
		}
	}
	return nil
}

// sum is the checksum of the bits of all sectors, without the sectors' own checksums: a CRC over bytes and their CRC is always
// the same.
func (m *blockMap) sum() uint32 {
	var empty [sectorPayload]byte
	var sum uint32
	for _, s := range m.sectors {
		if s == nil {
			s = &empty
		}
		sum = crc32.Update(sum, castagnoli, s[:])
	}
	return sum
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
