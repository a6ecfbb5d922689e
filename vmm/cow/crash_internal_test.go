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
	left    *int               // operations until the power goes, none if negative; one count for all disks of a host
}

func newVolatileDisk(size int64, found sectors, left *int) *volatileDisk {
	return &volatileDisk{bytes: size, now: maps.Clone(found), durable: found, pending: map[int64][][]byte{}, left: left}
}

// emptyDisk has a layer in it that nothing was written to, and which nobody has synced.
func emptyDisk(h header, left *int) *volatileDisk {
	d := newVolatileDisk(h.fileSize(), sectors{}, left)
	if *left != 0 {
		_, _ = d.WriteAt(h.marshal(), 0)
	}
	return d
}

func (d *volatileDisk) power() error {
	if *d.left == 0 {
		return errPower
	}
	if *d.left > 0 {
		*d.left--
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

func (d *volatileDisk) readv(bufs [][]byte, off int64) (n int64, err error) {
	for _, p := range bufs {
		_, _ = d.ReadAt(p, off+n)
		n += int64(len(p))
	}
	return n, nil
}

func (d *volatileDisk) writev(bufs [][]byte, off int64) error {
	_, err := d.WriteAt(bytes.Join(bufs, nil), off)
	return err
}

func (d *volatileDisk) size() (int64, error)          { return d.bytes, nil }
func (d *volatileDisk) Close() error                  { return nil }
func (d *volatileDisk) lock() error                   { return nil }
func (d *volatileDisk) unlock() error                 { return nil }
func (d *volatileDisk) next(off int64) (int64, error) { return off, nil }

func (d *volatileDisk) clone(int64, storage, int64, int64) bool { return false }

// resize takes effect at once: a file system's journal keeps sizes in order with what is synced after them.
func (d *volatileDisk) resize(size int64) error {
	if err := d.power(); err != nil {
		return err
	}
	d.bytes = size
	return nil
}

func (d *volatileDisk) punch(off, n int64) {
	if *d.left != 0 {
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

// host is a disk made of layers on volatile disks that lose their power together.
type host struct {
	h      header
	layers []*volatileDisk
	left   int
}

func newHost(h header) *host {
	s := &host{h: h, left: -1}
	s.layers = []*volatileDisk{emptyDisk(h, &s.left)}
	_ = s.layers[0].sync()
	return s
}

// open is New on the layers there are.
func (s *host) open() (*Chain, error) {
	c := &Chain{size: s.h.virtualSize, writing: newExclusion()}
	for i, d := range s.layers {
		l, err := loadLayer(fmt.Sprintf("volatile %d", i), d)
		if err != nil {
			return nil, err
		}
		c.layers = append(c.layers, l)
		c.top = l
	}
	return c, nil
}

// freeze puts a layer on top that was just made.
func (s *host) freeze(c *Chain) error {
	d := emptyDisk(s.h, &s.left)
	next, err := loadTop("next", d)
	if err != nil {
		return errPower // the header could not even be written
	}
	if err := errors.Join(c.ready(next), c.freeze(next)); err != nil {
		return err
	}
	s.layers = append(s.layers, d)
	return nil
}

// crash takes the power from all disks and gives it back.
func (s *host) crash(rng *rand.Rand) {
	for i, d := range s.layers {
		s.layers[i] = newVolatileDisk(d.bytes, d.crash(rng), &s.left)
	}
	s.left = -1
}

const (
	cutBlocks = 2040 // the last few are in the second sector of the map
	cutFirst  = 2024
)

// The power goes at a random operation. The layers must open, and every sector be what it was at the last flush or became
// since, however often the disk was frozen meanwhile.
func TestPowerCut(t *testing.T) {
	h, err := newHeader(cutBlocks * BlockSize)
	if err != nil {
		t.Fatal(err)
	}
	for seed := range 150 {
		rng := rand.New(rand.NewPCG(uint64(seed), 3))
		disk := newHost(h)
		virtual := &history{cutFirst * BlockSize, make([]byte, (cutBlocks-cutFirst)*BlockSize), map[int64][][]byte{}}
		for cut := range 4 {
			c, err := disk.open()
			if err != nil {
				t.Fatalf("seed %d, cut %d: %v", seed, cut, err)
			}
			found := make([]byte, len(virtual.now))
			if _, err := c.ReadAt(found, virtual.first); err != nil {
				t.Fatal(err)
			}
			if err := virtual.check(found); err != nil {
				t.Fatalf("seed %d, cut %d: %v", seed, cut, err)
			}
			virtual = &history{virtual.first, found, map[int64][][]byte{}}
			disk.left = rng.IntN(60)
			disk.useUntilCut(rng, c, virtual)
			disk.crash(rng)
		}
	}
}

// useUntilCut writes, discards, flushes and freezes where the history looks until an operation fails.
func (s *host) useUntilCut(rng *rand.Rand, c *Chain, virtual *history) {
	first := virtual.first
	for {
		off := first + rng.Int64N(c.size-first)/sector*sector
		n := min(sector*(1+rng.Int64N(20)), c.size-off)
		if rng.IntN(3) == 0 {
			off, n = off/BlockSize*BlockSize, (n+BlockSize-1)/BlockSize*BlockSize
			n = min(n, c.size-off)
		}
		var err error
		switch rng.IntN(14) {
		case 0, 1:
			if err = c.Flush(); err == nil {
				clear(virtual.past)
			}
		case 2:
			if err = s.freeze(c); err == nil {
				clear(virtual.past)
			}
		case 3, 4:
			virtual.write(make([]byte, n), off)
			err = c.Discard(off, n)
		case 5:
			virtual.write(make([]byte, n), off)
			err = c.Zero(off, n)
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

// The power goes while a layer is sealed, or made by a merge. What was there reads as before; a seal is there only if all it
// stands for is; and sealing again succeeds.
func TestPowerCutWhileSealing(t *testing.T) {
	h, err := newHeader(1030 * BlockSize) // sums on two pages
	if err != nil {
		t.Fatal(err)
	}
	sealed, unsealed := 0, 0
	for seed := range 80 {
		rng := rand.New(rand.NewPCG(uint64(seed), 4))
		disk := newHost(h)
		c, err := disk.open()
		if err != nil {
			t.Fatal(err)
		}
		for range 10 {
			b := rng.Int64N(h.blocks())
			if _, err := c.WriteAt(bytes.Repeat([]byte{byte(1 + rng.IntN(255))}, BlockSize), b*BlockSize); err != nil {
				t.Fatal(err)
			}
		}
		if err := c.Flush(); err != nil {
			t.Fatal(err)
		}
		want := make([]byte, c.size)
		if _, err := c.ReadAt(want, 0); err != nil {
			t.Fatal(err)
		}
		merge := seed%2 == 0
		if merge {
			to := newHost(h)
			dst, err := to.open()
			if err != nil {
				t.Fatal(err)
			}
			to.left = rng.IntN(30)
			err = mergeChain(dst, c)
			to.crash(rng)
			if err != nil {
				unsealed++
				continue // it is removed
			}
			disk = to
		} else {
			disk.left = rng.IntN(12)
			_ = c.top.seal()
			disk.crash(rng)
		}
		found, err := disk.open()
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		got := make([]byte, c.size)
		if _, err := found.ReadAt(got, 0); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("seed %d: other bytes: %v", seed, err)
		}
		if err := found.top.verify(); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if found.top.sealed {
			sealed++
			continue
		}
		unsealed++
		if merge {
			t.Fatalf("seed %d: a merge that succeeded has no seal", seed)
		}
		if err := found.top.seal(); err != nil {
			t.Fatal(err)
		}
		if again, err := disk.open(); err != nil || !again.top.sealed || again.top.verify() != nil {
			t.Fatalf("seed %d: sealed again: %v", seed, err)
		}
	}
	if sealed == 0 || unsealed == 0 {
		t.Errorf("%d with a seal, %d without: the test cuts in the wrong place", sealed, unsealed)
	}
}

// A lost write is reported for ever, since the kernel reports it once; a full disk is not.
func TestFailedFlush(t *testing.T) {
	h, _ := newHeader(16 * BlockSize)
	disk := newHost(h)
	c, err := disk.open()
	if err != nil {
		t.Fatal(err)
	}
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
	again, err := loadLayer("volatile", newVolatileDisk(disk.layers[0].bytes, disk.layers[0].durable, &disk.left))
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
	f.Add(m.appendPage(nil, 0), uint16(0), uint16(9))
	f.Add(make([]byte, 4096), uint16(2030), uint16(5))
	f.Add([]byte{1}, uint16(0), uint16(0))
	f.Fuzz(func(t *testing.T, raw []byte, at, n uint16) {
		m := newBlockMap(h)
		raw = raw[:min(len(raw)/sectorBytes*sectorBytes, BlockSize)]
		if m.load(0, raw) != nil {
			return
		}
		again := m.appendPage(nil, 0)
		for i := 0; i < len(raw); i += sectorBytes {
			got, was := again[i:i+sectorBytes], raw[i:i+sectorBytes]
			if !bytes.Equal(got, was) {
				t.Fatalf("the sector at %d differs when written again", i)
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
