package cow_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"torpor/vmm/cow"
)

const block = cow.BlockSize

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func create(t testing.TB, size int64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "layer")
	check(t, cow.Create(path, size))
	return path
}

func open(t testing.TB, base string, layers []string, top string) *cow.Chain {
	t.Helper()
	c, err := cow.OpenChain(base, layers, top)
	check(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

func openRW(t testing.TB, path string) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	check(t, err)
	return f
}

// scatter cuts p into buffers of odd sizes, empty ones among them.
func scatter(rng *rand.Rand, p []byte) [][]byte {
	var bufs [][]byte
	for len(p) > 0 {
		n := min(rng.IntN(3*block), len(p))
		bufs = append(bufs, p[:n:n])
		p = p[n:]
	}
	return bufs
}

func clearBytes(p []byte) error {
	clear(p)
	return nil
}

func contents(t testing.TB, c *cow.Chain) []byte {
	t.Helper()
	p := make([]byte, c.Size())
	_, err := c.ReadAt(p, 0)
	check(t, err)
	return p
}

func fill(rng *rand.Rand, n int) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(rng.Uint32())
	}
	return p
}

func write(t testing.TB, name string, p []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	check(t, os.WriteFile(path, p, 0o600))
	return path
}

func TestDamageIsNamed(t *testing.T) {
	cases := []struct {
		name, part string
		harm       func(b []byte) []byte
	}{
		{"empty", "header", func(b []byte) []byte { return nil }},
		{"header only", "file size", func(b []byte) []byte { return b[:4096] }},
		{"magic", "header", func(b []byte) []byte { b[0]++; return b }},
		{"version", "header", func(b []byte) []byte { b[8] += 2; return b }},
		{"virtual size", "header", func(b []byte) []byte { b[17]++; return b }},
		{"checksum", "header", func(b []byte) []byte { b[33] ^= 4; return b }},
		{"reserved", "header", func(b []byte) []byte { b[4000] = 1; return b }},
		{"one byte short", "file size", func(b []byte) []byte { return b[:len(b)-1] }},
		{"one byte long", "file size", func(b []byte) []byte { return append(b, 0) }},
		{"map bit", "map", func(b []byte) []byte { b[4096] ^= 1; return b }},
		{"map checksum", "map", func(b []byte) []byte { b[4096+510] ^= 1; return b }},
		{"map, empty sector", "map", func(b []byte) []byte { b[4096+512] = 1; return b }},
		{"map padding", "map", func(b []byte) []byte { b[8191] = 1; return b }},
		{"invalid state", "map", func(b []byte) []byte { b[4096] |= 3; return resum(b) }},
		{"block past the end", "map", func(b []byte) []byte { b[4096+1] = 1; return resum(b) }},
	}
	const seal = 7 * block
	for name := range goldenInfo {
		t.Run(name, func(t *testing.T) {
			for _, c := range cases {
				damage(t, c.name, c.part, c.harm(goldenFile(t, name)))
			}
		})
	}
	good := func() []byte { return goldenFile(t, "v2.sealed.layer") }
	flip := func(at int) []byte { b := good(); b[at] ^= 1; return b }
	damage(t, "seal magic", "seal", flip(seal))
	damage(t, "seal checksum", "seal", flip(seal+13))
	damage(t, "seal padding", "seal", flip(seal+4000))
	damage(t, "seal without its end", "file size", good()[:seal])
	another := resum(append(append(good()[:4096:4096], 1|2<<4|1<<6), good()[4097:]...))
	damage(t, "another map", "seal", another)
	damage(t, "a seal on version 1", "file size", append(goldenFile(t, "v1.layer"), good()[6*block:]...))
}

// damage demands that the layer in raw is refused for that part by everything that opens it.
func damage(t *testing.T, name, part string, raw []byte) {
	t.Helper()
	path := write(t, "layer", raw)
	_, inspect := cow.Inspect(path)
	_, chain := cow.OpenChain("", nil, path)
	_, below := cow.OpenChain("", []string{path}, "")
	for i, err := range []error{inspect, chain, below, cow.Verify(path), cow.Merge(path+".merged", path), cow.Seal(path)} {
		var corrupt *cow.CorruptError
		if !errors.As(err, &corrupt) || corrupt.Part != part || corrupt.Path != path {
			t.Errorf("%s, %d: %v, want damage of the %s", name, i, err, part)
		}
	}
	if _, err := os.Lstat(path + ".merged"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s: a failed merge leaves something: %v", name, err)
	}
	if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, raw) {
		t.Errorf("%s: changed: %v", name, err)
	}
}

// resum makes the checksum of the first map sector right.
func resum(b []byte) []byte {
	binary.LittleEndian.PutUint32(b[4096+508:], crc32.Checksum(b[4096:4096+508], crc32.MakeTable(crc32.Castagnoli)))
	return b
}

func TestCreateRefuses(t *testing.T) {
	for _, size := range []int64{-block, 0, 1, block - 1, block + 1, cow.MaxSize + block} {
		path := filepath.Join(t.TempDir(), "layer")
		if err := cow.Create(path, size); err == nil {
			t.Errorf("made a disk of %d bytes", size)
		}
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("left a file: %v", err)
		}
	}
	path := write(t, "there", []byte("precious"))
	if err := cow.Create(path, block); !errors.Is(err, os.ErrExist) {
		t.Errorf("over an existing file: %v", err)
	}
}

func TestOpenChainRefuses(t *testing.T) {
	small, large := create(t, 16*block), create(t, 32*block)
	base := write(t, "base", make([]byte, 17*block))
	for name, open := range map[string]func() (*cow.Chain, error){
		"nothing":           func() (*cow.Chain, error) { return cow.OpenChain("", nil, "") },
		"an empty base":     func() (*cow.Chain, error) { return cow.OpenChain(write(t, "empty", nil), nil, "") },
		"no such base":      func() (*cow.Chain, error) { return cow.OpenChain(base+"x", nil, "") },
		"no such layer":     func() (*cow.Chain, error) { return cow.OpenChain(base, []string{base + "x"}, "") },
		"different sizes":   func() (*cow.Chain, error) { return cow.OpenChain("", []string{small}, large) },
		"base is larger":    func() (*cow.Chain, error) { return cow.OpenChain(base, nil, small) },
		"base as layer":     func() (*cow.Chain, error) { return cow.OpenChain("", []string{base}, "") },
		"a directory":       func() (*cow.Chain, error) { return cow.OpenChain("", nil, t.TempDir()) },
		"top is also below": func() (*cow.Chain, error) { return cow.OpenChain("", []string{small}, base) },
	} {
		if c, err := open(); err == nil {
			c.Close()
			t.Errorf("opened a disk with %s", name)
		}
	}
}

// The files are the chain's whatever comes of it.
func TestOpenFilesTakesThem(t *testing.T) {
	for _, fits := range []bool{true, false} {
		size := int64(1 << 20)
		f := cow.Files{Base: openRW(t, create(t, block)), Layers: []*os.File{openRW(t, create(t, size))}}
		if !fits {
			size *= 2
		}
		f.Top = openRW(t, create(t, size))
		c, err := cow.OpenFiles(f)
		if (err == nil) != fits {
			t.Fatalf("fits %v: %v", fits, err)
		}
		if fits {
			check(t, c.Close())
		}
		for _, f := range []*os.File{f.Base, f.Layers[0], f.Top} {
			if err := f.Close(); !errors.Is(err, os.ErrClosed) {
				t.Errorf("fits %v: %s was left open (%v)", fits, f.Name(), err)
			}
		}
	}
}

func TestOneWriter(t *testing.T) {
	path := create(t, 16*block)
	c := open(t, "", nil, path)
	if _, err := cow.OpenChain("", nil, path); !errors.Is(err, cow.ErrInUse) {
		t.Fatalf("a second writer: %v", err)
	}
	open(t, "", []string{path}, "") // readers may
	check(t, c.Close())
	open(t, "", nil, path)
}

func TestReadOnlyAndBounds(t *testing.T) {
	ro := open(t, write(t, "base", make([]byte, 10*block+512)), nil, "")
	if !ro.ReadOnly() || ro.Size() != 10*block+512 {
		t.Errorf("read-only %v, %d bytes", ro.ReadOnly(), ro.Size())
	}
	_, err := ro.WriteAt(make([]byte, 512), 0)
	if !errors.Is(err, cow.ErrReadOnly) || !errors.Is(ro.Discard(0, block), cow.ErrReadOnly) {
		t.Errorf("write to a read-only disk: %v", err)
	}
	if !errors.Is(ro.Zero(0, block), cow.ErrReadOnly) || ro.Freeze(openRW(t, create(t, block))) == nil {
		t.Error("zeroed or froze a read-only disk")
	}
	check(t, ro.Flush())
	rw := open(t, "", nil, create(t, 16*block))
	for _, span := range [][2]int64{{16 * block, 1}, {16*block - 1, 2}, {-1, 1}, {1 << 62, 1}} {
		p := make([]byte, span[1])
		_, read := rw.ReadAt(p, span[0])
		_, write := rw.WriteAt(p, span[0])
		for _, err := range []error{read, write, rw.Discard(span[0], span[1]), rw.Zero(span[0], span[1])} {
			if !errors.Is(err, cow.ErrOutOfRange) {
				t.Errorf("%d bytes at %d: %v", span[1], span[0], err)
			}
		}
	}
	if err := rw.Discard(0, 1<<62); !errors.Is(err, cow.ErrOutOfRange) {
		t.Errorf("discard of everything: %v", err)
	}
	if n, err := rw.ReadAt(nil, 16*block); n != 0 || err != nil {
		t.Errorf("nothing, at the end: %d, %v", n, err)
	}
}

// A disk of any history reads like a flat array with the same history: writes, discards, snapshots, merges, reopening.
func TestLikeAFlatDisk(t *testing.T) {
	const size = 2100 * block // more than a map sector has
	for seed := range uint64(4) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			dir := t.TempDir()
			layerPath := func(i int) string { return filepath.Join(dir, fmt.Sprintf("layer%d", i)) }
			flat := make([]byte, size)
			image := fill(rng, 2000*block+512) // the base ends within a block and before the disk
			copy(flat, image)
			base := write(t, "base", image)
			var layers []string
			made := 0
			check(t, cow.Create(layerPath(made), size))
			c, err := cow.OpenChain(base, nil, layerPath(made))
			check(t, err)
			defer func() { c.Close() }()
			for step := range 300 {
				off := rng.Int64N(size)
				if rng.IntN(2) == 0 { // around the seam of the map's sectors and the base's end
					off = 1990*block + rng.Int64N(60*block)
				}
				n := min(rng.Int64N(20*block), size-off)
				if rng.IntN(2) == 0 {
					off, n = off/block*block, n/block*block
				}
				switch op := rng.IntN(20); {
				case op < 9:
					p := fill(rng, int(n))
					check(t, c.WriteV(scatter(rng, p), off))
					copy(flat[off:], p)
				case op < 11:
					check(t, c.Discard(off, n))
					clear(flat[off : off+n])
				case op < 13:
					check(t, c.Zero(off, n))
					clear(flat[off : off+n])
				case op < 16:
					p := fill(rng, int(n))
					check(t, c.ReadV(scatter(rng, p), off, clearBytes))
					if !bytes.Equal(p, flat[off:off+n]) {
						t.Fatalf("step %d: other bytes at %d", step, off)
					}
				case op < 17:
					check(t, c.Flush())
				case op < 18 && len(layers) < 4: // freeze the top and go on
					layers = append(layers, layerPath(made))
					made++
					check(t, cow.Create(layerPath(made), size))
					check(t, c.Freeze(openRW(t, layerPath(made))))
					check(t, cow.Seal(layers[len(layers)-1]))
				default: // in another process; perhaps merge
					check(t, c.Flush())
					check(t, c.Close())
					layers = append(layers, layerPath(made))
					if len(layers) > 3 {
						made++
						from := rng.IntN(2)
						check(t, cow.Merge(layerPath(made), layers[from:]...))
						check(t, cow.Verify(layerPath(made)))
						layers = append(layers[:from:from], layerPath(made))
					}
					made++
					check(t, cow.Create(layerPath(made), size))
					c, err = cow.OpenChain(base, layers, layerPath(made))
					check(t, err)
				}
			}
			if !bytes.Equal(contents(t, c), flat) {
				t.Fatal("other bytes at the end")
			}
		})
	}
}

// Merging keeps zero blocks, drops data that is zero, and takes no room for what is not there.
func TestMergeIsSparse(t *testing.T) {
	const size = 64 << 20
	a, b := create(t, size), create(t, size)
	ca := open(t, "", nil, a)
	for _, at := range []int64{0, block, 5 << 20} {
		_, err := ca.WriteAt(bytes.Repeat([]byte{1}, block), at)
		check(t, err)
	}
	_, err := ca.WriteAt(make([]byte, 2*block), 7<<20)
	check(t, err)
	check(t, ca.Flush())
	cb := open(t, "", nil, b)
	check(t, cb.Discard(block, block))
	_, err = cb.WriteAt(bytes.Repeat([]byte{2}, block), 5<<20)
	check(t, err)
	check(t, cb.Flush())
	dst := filepath.Join(t.TempDir(), "merged")
	check(t, cow.Merge(dst, a, b))
	info, err := cow.Inspect(dst)
	if want := (cow.Info{Version: 2, VirtualSize: size, DataBlocks: 2, ZeroBlocks: 3, Sealed: true}); err != nil || info != want {
		t.Errorf("%+v, %v, want %+v", info, err, want)
	}
	if got := allocated(t, dst); got > 64<<10 {
		t.Errorf("%d bytes on disk", got)
	}
	if err := cow.Merge(dst, a); !errors.Is(err, os.ErrExist) {
		t.Errorf("merged over an existing file: %v", err)
	}
	if _, err := os.Lstat(dst); err != nil {
		t.Errorf("a refused merge removed the file that was there: %v", err)
	}
	if cow.Merge(filepath.Join(t.TempDir(), "none")) == nil {
		t.Error("merged nothing")
	}
}

// Discard gives the room of whole blocks back, also of those that were zeroed before; Zero keeps it.
func TestDiscardGivesRoomBack(t *testing.T) {
	path := create(t, 16<<20)
	c := open(t, "", nil, path)
	_, err := c.WriteAt(bytes.Repeat([]byte{1}, 8<<20), 0)
	check(t, err)
	check(t, c.Flush())
	for _, step := range []struct {
		name        string
		do          func(off, n int64) error
		least, most int64
	}{
		{"zero", c.Zero, 8 << 20, 9 << 20},
		{"discard", c.Discard, 0, 1 << 20},
		{"zero again", c.Zero, 0, 1 << 20},
	} {
		check(t, step.do(100, 8<<20-200))
		check(t, c.Flush())
		if got := allocated(t, path); got < step.least || got > step.most {
			t.Errorf("%s: %d bytes on disk", step.name, got)
		}
		want := make([]byte, 8<<20)
		copy(want, bytes.Repeat([]byte{1}, 100))
		copy(want[8<<20-100:], bytes.Repeat([]byte{1}, 100))
		if got := contents(t, c); !bytes.Equal(got[:8<<20], want) {
			t.Errorf("%s: other bytes", step.name)
		}
	}
}

func allocated(t testing.TB, path string) int64 {
	t.Helper()
	var stat unix.Stat_t
	check(t, unix.Stat(path, &stat))
	return stat.Blocks * 512
}

// A snapshot of a disk and forks of it share the frozen layers, take no room and no time for what they share, and see nothing
// of one another.
func TestFreezeAndFork(t *testing.T) {
	const size = 1 << 30
	image := fill(rand.New(rand.NewPCG(1, 1)), 4*block)
	base := write(t, "base", image)
	first := create(t, size)
	c := open(t, base, nil, first)
	_, err := c.WriteAt([]byte("first"), 0)
	check(t, err)
	second := create(t, size)
	check(t, c.Freeze(openRW(t, second)))
	_, err = c.WriteAt([]byte("second"), 0)
	check(t, err)
	check(t, c.Discard(block, block))
	check(t, c.Flush())
	if err := cow.Seal(first); err != nil {
		t.Errorf("the frozen layer is still locked: %v", err)
	}
	forks := map[string]*cow.Chain{}
	for _, name := range []string{"a", "b"} {
		top := create(t, size)
		forks[name] = open(t, base, []string{first}, top)
		if got := allocated(t, top); got > 64<<10 {
			t.Errorf("a fork takes %d bytes", got)
		}
		_, err := forks[name].WriteAt([]byte(name), 2*block)
		check(t, err)
	}
	p := make([]byte, 4*block)
	for name, f := range forks {
		_, err := f.ReadAt(p, 0)
		check(t, err)
		want := bytes.Clone(image)
		copy(want, "first")
		copy(want[2*block:], name)
		if !bytes.Equal(p, want) {
			t.Errorf("fork %s has other bytes", name)
		}
	}
	_, err = c.ReadAt(p, 0)
	check(t, err)
	if string(p[:6]) != "second" || !bytes.Equal(p[block:2*block], make([]byte, block)) || !bytes.Equal(p[2*block:], image[2*block:]) {
		t.Error("the first disk has other bytes")
	}
	check(t, c.Close())
	again := open(t, base, []string{first}, second)
	if _, err := again.ReadAt(p, 0); err != nil || string(p[:6]) != "second" {
		t.Errorf("opened again: %q, %v", p[:6], err)
	}
}

func TestFreezeRefuses(t *testing.T) {
	top := create(t, 16*block)
	c := open(t, "", nil, top)
	_, err := c.WriteAt([]byte("x"), 0)
	check(t, err)
	check(t, c.Flush())
	used := create(t, 16*block)
	u := open(t, "", nil, used)
	_, err = u.WriteAt([]byte("y"), 0)
	check(t, err)
	check(t, u.Flush())
	for name, path := range map[string]string{
		"its own top": top, "another's top": used, "another size": create(t, 8*block),
		"something else": write(t, "file", []byte("x")), "a sealed layer": write(t, "sealed", goldenFile(t, "v2.sealed.layer")),
	} {
		if c.Freeze(openRW(t, path)) == nil {
			t.Errorf("put %s on top", name)
		}
	}
	check(t, u.Close())
	if c.Freeze(openRW(t, used)) == nil {
		t.Error("put a layer with contents on top")
	}
	_, err = c.WriteAt([]byte("z"), block)
	check(t, err)
	check(t, c.Flush())
	check(t, c.Close())
	if info, err := cow.Inspect(top); err != nil || info.DataBlocks != 2 {
		t.Errorf("after refusals the disk goes on elsewhere: %+v, %v", info, err)
	}
}

// A full disk is an error of the one write; what was there stays, other requests go on, and with room again so do writes.
func TestDiskFull(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=256k"); err != nil {
		t.Skipf("needs to mount a small file system: %v", err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	path := filepath.Join(dir, "layer")
	check(t, cow.Create(path, 1<<20))
	c := open(t, write(t, "base", bytes.Repeat([]byte{7}, 1<<20)), nil, path)
	old := bytes.Repeat([]byte{1}, 64<<10)
	_, err := c.WriteAt(old, 0)
	check(t, err)
	check(t, c.Flush())
	if _, err := c.WriteAt(make([]byte, 512<<10), 128<<10); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("%v, want no room", err)
	}
	p := make([]byte, 1<<20)
	_, err = c.ReadAt(p, 0)
	check(t, err)
	want := append(bytes.Clone(old), bytes.Repeat([]byte{7}, 1<<20-64<<10)...)
	if !bytes.Equal(p, want) {
		t.Error("a failed write changed blocks that the layer did not have")
	}
	_, err = c.WriteAt(bytes.Repeat([]byte{2}, 64<<10), 0) // in place
	check(t, err)
	check(t, c.Flush())
	check(t, c.Discard(0, 64<<10))
	check(t, c.Discard(128<<10, 512<<10)) // what the failed write took
	_, err = c.WriteAt(bytes.Repeat([]byte{3}, 64<<10), 256<<10)
	check(t, err)
	check(t, c.Flush())
	check(t, c.Close())
	check(t, cow.Verify(path))
}

// Writes to the same blocks, none of which is in the top yet, keep one another's bytes.
func TestConcurrentPartialWrites(t *testing.T) {
	const sector, sectors = 512, 64
	for range 50 {
		c := open(t, write(t, "base", bytes.Repeat([]byte{9}, sectors*sector)), nil, create(t, sectors*sector))
		var wg sync.WaitGroup
		for s := range int64(sectors) {
			if s%7 == 6 {
				continue // stays as the base has it
			}
			wg.Go(func() {
				if _, err := c.WriteAt(bytes.Repeat([]byte{byte(100 + s)}, sector), s*sector); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		got := contents(t, c)
		for s := range sectors {
			want := byte(100 + s)
			if s%7 == 6 {
				want = 9
			}
			if !bytes.Equal(got[s*sector:(s+1)*sector], bytes.Repeat([]byte{want}, sector)) {
				t.Fatalf("sector %d was undone by another write", s)
			}
		}
	}
}

// A flush keeps exactly what was written before it, for a process that dies right after.
func TestFlushedSurvivesTheProcess(t *testing.T) {
	path := create(t, 16*block)
	c := open(t, "", nil, path)
	_, err := c.WriteAt([]byte("kept"), 3*block+100)
	check(t, err)
	check(t, c.Flush())
	_, err = c.WriteAt([]byte("lost"), 9*block)
	check(t, err)
	raw, err := os.ReadFile(path) // what the kernel has; the map in memory is gone
	check(t, err)
	p := contents(t, open(t, "", []string{write(t, "copy", raw)}, ""))
	if string(p[3*block+100:3*block+104]) != "kept" || p[9*block] != 0 {
		t.Errorf("%q, %q", p[3*block+100:3*block+104], p[9*block:9*block+4])
	}
}

func TestConcurrency(t *testing.T) {
	const workers, each = 4, 64
	c := open(t, write(t, "base", make([]byte, workers*each*block)), nil, create(t, workers*each*block))
	var wg sync.WaitGroup
	for w := range int64(workers) {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(w), 2))
			area := io.NewSectionReader(c, w*each*block, each*block)
			want := make([]byte, each*block)
			for range 200 {
				off := rng.Int64N(int64(len(want)))
				n := min(rng.Int64N(3*block), int64(len(want))-off)
				var err error
				switch rng.IntN(8) {
				case 0:
					err = c.Flush()
				case 1:
					clear(want[off : off+n])
					err = c.Discard(w*each*block+off, n)
				case 2:
					clear(want[off : off+n])
					err = c.Zero(w*each*block+off, n)
				case 3:
					if w == 0 {
						err = c.Freeze(openRW(t, create(t, workers*each*block)))
					}
				default:
					copy(want[off:off+n], fill(rng, int(n)))
					_, err = c.WriteAt(want[off:off+n], w*each*block+off)
				}
				if err != nil {
					t.Error(err)
				}
			}
			if got, err := io.ReadAll(area); err != nil || !bytes.Equal(got, want) {
				t.Errorf("worker %d reads other bytes: %v", w, err)
			}
		})
	}
	wg.Wait()
}

// FuzzOpen takes any bytes for a layer: it is refused or it works.
func FuzzOpen(f *testing.F) {
	for name := range goldenInfo {
		f.Add(goldenFile(f, name))
	}
	f.Add(goldenFile(f, "v1.layer")[:4096])
	f.Add([]byte("TORPCOW\n"))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, raw []byte) {
		path := write(t, "layer", raw)
		c, err := cow.OpenChain("", nil, path)
		if errors.Is(err, cow.ErrSealed) {
			readsAndMerges(t, path)
			return
		}
		if err != nil {
			if _, err2 := cow.Inspect(path); err2 == nil {
				t.Fatalf("inspected, but not opened: %v", err)
			}
			return
		}
		defer c.Close()
		before := contents(t, c)
		_, err = c.WriteAt([]byte("x"), 1)
		check(t, err)
		check(t, c.Flush())
		check(t, cow.Verify(path))
		before[1] = 'x'
		if !bytes.Equal(contents(t, open(t, "", []string{path}, "")), before) {
			t.Fatal("other bytes after a write and a flush")
		}
		readsAndMerges(t, path)
	})
}

// readsAndMerges demands that a layer that opens can be merged, with the same bytes as before.
func readsAndMerges(t *testing.T, path string) {
	t.Helper()
	c, err := cow.OpenChain("", []string{path}, "")
	check(t, err)
	defer c.Close()
	merged := filepath.Join(t.TempDir(), "merged")
	check(t, cow.Merge(merged, path))
	check(t, cow.Verify(merged))
	m, err := cow.OpenChain("", []string{merged}, "")
	check(t, err)
	defer m.Close()
	if c.Size() <= 1<<24 && !bytes.Equal(contents(t, c), contents(t, m)) {
		t.Fatal("other bytes after a merge")
	}
}
