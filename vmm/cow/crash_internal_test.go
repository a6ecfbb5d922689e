package cow

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"
)

const sector = 512

var errPower = errors.New("no power")

// sectors is an image by sector number; sectors that are not there are zero.
type sectors map[int64][]byte

func (m sectors) get(s int64) []byte {
	if p := m[s]; p != nil {
		return p
	}
	return zeros[:sector]
}

// volatileDisk is a storage with a cache: a write is durable only after a sync, and when the power goes, of every sector any
// version since the last sync may be the one that is found.
type volatileDisk struct {
	bytes   int64
	now     sectors
	durable sectors
	pending map[int64][][]byte // by sector: the versions written since the last sync
	left    int                // operations until the power goes, none if negative
}

func newVolatileDisk(size int64, found sectors) *volatileDisk {
	return &volatileDisk{bytes: size, now: maps.Clone(found), durable: found, pending: map[int64][][]byte{}, left: -1}
}

// emptyDisk has a layer in it that nothing was written to.
func emptyDisk(h header) *volatileDisk {
	d := newVolatileDisk(h.fileSize(), sectors{})
	_, _ = d.WriteAt(h.marshal(), 0)
	_ = d.sync()
	return d
}

func (d *volatileDisk) power() error {
	if d.left == 0 {
		return errPower
	}
	if d.left > 0 {
		d.left--
	}
	return nil
}

func (d *volatileDisk) ReadAt(p []byte, off int64) (int, error) {
	for n := 0; n < len(p); {
		at := off + int64(n)
		n += copy(p[n:], d.now.get(at / sector)[at%sector:])
	}
	return len(p), nil
}

func (d *volatileDisk) WriteAt(p []byte, off int64) (int, error) {
	err := d.power()
	if err != nil {
		p = p[:len(p)/2/sector*sector] // cut off amid the write, but not amid a sector
	}
	for n := 0; n < len(p); {
		at := off + int64(n)
		changed := bytes.Clone(d.now.get(at / sector))
		n += copy(changed[at%sector:], p[n:])
		d.now[at/sector] = changed
		d.pending[at/sector] = append(d.pending[at/sector], changed)
	}
	return len(p), err
}

func (d *volatileDisk) size() (int64, error) { return d.bytes, nil }
func (d *volatileDisk) Close() error         { return nil }

func (d *volatileDisk) punch(off, n int64) {
	if d.left != 0 {
		_, _ = d.WriteAt(make([]byte, n), off)
	}
}

func (d *volatileDisk) sync() error {
	if err := d.power(); err != nil {
		return err
	}
	d.durable = maps.Clone(d.now)
	clear(d.pending)
	return nil
}

// crash returns what is found when the power is back.
func (d *volatileDisk) crash(rng *rand.Rand) sectors {
	found := maps.Clone(d.durable)
	for s, versions := range d.pending {
		if i := rng.IntN(len(versions) + 1); i < len(versions) {
			found[s] = versions[i]
		}
	}
	return found
}

// history is what each sector of the virtual disk from byte first on may be after a crash: what it was at the last flush and
// all it became since.
type history struct {
	first int64
	now   []byte
	past  map[int64][][]byte
}

func (h *history) write(p []byte, off int64) {
	off -= h.first
	for s := off / sector; s*sector < off+int64(len(p)); s++ {
		h.past[s] = append(h.past[s], bytes.Clone(h.now[s*sector:(s+1)*sector]))
	}
	copy(h.now[off:], p)
}

// check compares a disk after a crash with what it may be.
func (h *history) check(found []byte) error {
	for s := int64(0); s*sector < int64(len(found)); s++ {
		got := found[s*sector : (s+1)*sector]
		ok := bytes.Equal(got, h.now[s*sector:(s+1)*sector])
		for _, p := range h.past[s] {
			ok = ok || bytes.Equal(got, p)
		}
		if !ok {
			return fmt.Errorf("sector %d is something it never was since the last flush", h.first/sector+s)
		}
	}
	return nil
}

// The power goes at a random operation. The layer must open, and every sector be what it was at the last flush or became since.
func TestPowerCut(t *testing.T) {
	const (
		blocks = 2040 // the last few are in the second sector of the map
		first  = 2024
	)
	h, err := newHeader(blocks * BlockSize)
	if err != nil {
		t.Fatal(err)
	}
	for seed := range 100 {
		rng := rand.New(rand.NewPCG(uint64(seed), 3))
		disk := emptyDisk(h)
		virtual := &history{first * BlockSize, make([]byte, (blocks-first)*BlockSize), map[int64][][]byte{}}
		for cut := range 4 {
			c := &Chain{size: h.virtualSize}
			if c.top, err = loadLayer("volatile", disk); err != nil {
				t.Fatalf("seed %d, cut %d: %v", seed, cut, err)
			}
			c.layers = []*layer{c.top}
			found := make([]byte, len(virtual.now))
			if _, err := c.ReadAt(found, virtual.first); err != nil {
				t.Fatal(err)
			}
			if err := virtual.check(found); err != nil {
				t.Fatalf("seed %d, cut %d: %v", seed, cut, err)
			}
			virtual = &history{virtual.first, found, map[int64][][]byte{}}
			disk.left = rng.IntN(60)
			useUntilCut(rng, c, virtual)
			disk = newVolatileDisk(disk.bytes, disk.crash(rng))
		}
	}
}

// useUntilCut writes, discards and flushes where the history looks until an operation fails.
func useUntilCut(rng *rand.Rand, c *Chain, virtual *history) {
	first := virtual.first
	for {
		off := first + rng.Int64N(c.size-first)/sector*sector
		n := min(sector*(1+rng.Int64N(20)), c.size-off)
		if rng.IntN(3) == 0 {
			off, n = off/BlockSize*BlockSize, (n+BlockSize-1)/BlockSize*BlockSize
			n = min(n, c.size-off)
		}
		var err error
		switch rng.IntN(6) {
		case 0:
			if err = c.Flush(); err == nil {
				clear(virtual.past)
			}
		case 1, 2:
			virtual.write(make([]byte, n), off)
			err = c.Discard(off, n)
		default:
			p := bytes.Repeat([]byte{byte(1 + rng.IntN(255)), byte(rng.IntN(256))}, int(n/2))
			virtual.write(p, off)
			_, err = c.WriteAt(p, off)
		}
		if err != nil {
			return
		}
	}
}

// A lost write is reported for ever, since the kernel reports it once; a full disk is not.
func TestFailedFlush(t *testing.T) {
	h, _ := newHeader(16 * BlockSize)
	disk := emptyDisk(h)
	top, err := loadLayer("volatile", disk)
	if err != nil {
		t.Fatal(err)
	}
	c := &Chain{size: h.virtualSize, top: top, layers: []*layer{top}}
	if _, err := c.WriteAt([]byte("x"), 0); err != nil {
		t.Fatal(err)
	}
	disk.left = 1 // the sync succeeds, writing the map does not
	if err := c.Flush(); !errors.Is(err, errPower) {
		t.Fatalf("flush: %v", err)
	}
	disk.left = -1
	if err := c.Flush(); err != nil {
		t.Fatalf("flush, with room again: %v", err)
	}
	again, err := loadLayer("volatile", newVolatileDisk(disk.bytes, disk.durable))
	if err != nil || again.m.get(0) != data {
		t.Fatalf("the map was not written: %v", err)
	}
	disk.left = 0
	if err := c.Flush(); !errors.Is(err, errPower) {
		t.Fatalf("flush: %v", err)
	}
	disk.left = -1
	if err := c.Flush(); !errors.Is(err, errPower) {
		t.Fatalf("flush after a lost one: %v", err)
	}
}

// FuzzHeader takes any bytes for a header: refused, or it says the same when written again.
func FuzzHeader(f *testing.F) {
	for _, size := range []int64{BlockSize, 4 << 30, MaxSize} {
		h, err := newHeader(size)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(h.marshal())
	}
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, raw []byte) {
		h, err := unmarshalHeader(raw)
		if err == nil && !bytes.Equal(h.marshal(), raw[:headerBytes]) {
			t.Fatal("written again, it differs")
		}
	})
}

// FuzzMap takes any bytes for a map: refused, or it says the same when written again.
func FuzzMap(f *testing.F) {
	h, _ := newHeader(2100 * BlockSize)
	m := newBlockMap(h)
	m.set(2000, 100, data)
	m.set(5, 7, zero)
	f.Add(append(m.sector(0), m.sector(1)...), uint16(0), uint16(9))
	f.Add(make([]byte, 4096), uint16(2030), uint16(5))
	f.Add([]byte{1}, uint16(0), uint16(0))
	f.Fuzz(func(t *testing.T, raw []byte, at, n uint16) {
		m := newBlockMap(h)
		if m.load(raw) != nil {
			return
		}
		for i := range h.mapSectors() {
			if len(raw) >= int(i+1)*sectorBytes {
				if s := raw[i*sectorBytes:][:sectorBytes]; !isZero(s) && !bytes.Equal(m.sector(i), s) {
					t.Fatalf("sector %d differs when written again", i)
				}
			}
		}
		b := int64(at) % m.blocks
		limit := min(int64(n)+1, m.blocks-b)
		s, run := m.run(b, limit)
		for i := range limit {
			if (m.get(b+i) == s) != (i < run) && i <= run {
				t.Fatalf("the run of %d from block %d ends elsewhere", run, b)
			}
		}
	})
}
