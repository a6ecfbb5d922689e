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

// golden is a layer put together by hand from FORMAT.md: a disk of 16 blocks, of which block 1 is data and 2 and 3 are zero.
func golden() []byte {
	table := crc32.MakeTable(crc32.Castagnoli)
	b := make([]byte, 4096+4096+16*4096)
	copy(b, "TORPCOW\n")
	binary.LittleEndian.PutUint32(b[8:], 1)
	binary.LittleEndian.PutUint32(b[12:], 4096)
	binary.LittleEndian.PutUint64(b[16:], 16*4096)
	binary.LittleEndian.PutUint64(b[24:], 8192)
	binary.LittleEndian.PutUint32(b[32:], crc32.Checksum(b[:32], table))
	b[4096] = 1<<2 | 2<<4 | 2<<6
	binary.LittleEndian.PutUint32(b[4096+508:], crc32.Checksum(b[4096:4096+508], table))
	copy(b[8192+4096:], bytes.Repeat([]byte("data"), 1024))
	return b
}

func TestGolden(t *testing.T) {
	want := golden()
	// The header, byte by byte: a change here is a new version of the format.
	if got := fmt.Sprintf("%x", want[:40]); got != "544f5250434f570a010000000010000000000100000000000020000000000000c162613700000000" {
		t.Errorf("header %s", got)
	}
	path := create(t, 16*block)
	c := open(t, "", nil, path)
	_, err := c.WriteAt(bytes.Repeat([]byte("data"), 1024), block)
	check(t, err)
	check(t, c.Discard(2*block, 2*block))
	check(t, c.Flush())
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, want) {
		t.Errorf("the written layer differs from the one made by hand: %v", err)
	}

	byHand := write(t, "golden", want)
	info, err := cow.Inspect(byHand)
	if want := (cow.Info{VirtualSize: 16 * block, DataBlocks: 1, ZeroBlocks: 2}); err != nil || info != want {
		t.Errorf("%+v, %v", info, err)
	}
	check(t, cow.Verify(byHand))
	base := bytes.Repeat([]byte{7}, 16*block)
	disk := contents(t, open(t, write(t, "base", base), []string{byHand}, ""))
	copy(base[block:], bytes.Repeat([]byte("data"), 1024))
	clear(base[2*block : 4*block])
	if !bytes.Equal(disk, base) {
		t.Error("the disk has other bytes")
	}
}

func TestDamageIsNamed(t *testing.T) {
	for _, c := range []struct {
		name, part string
		harm       func(b []byte) []byte
	}{
		{"empty", "header", func(b []byte) []byte { return nil }},
		{"header only", "file size", func(b []byte) []byte { return b[:4096] }},
		{"magic", "header", func(b []byte) []byte { b[0]++; return b }},
		{"version", "header", func(b []byte) []byte { b[8]++; return b }},
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
		{"block past the end", "map", func(b []byte) []byte { b[4096+4] = 1; return resum(b) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := write(t, "layer", c.harm(golden()))
			_, inspect := cow.Inspect(path)
			_, chain := cow.OpenChain("", nil, path)
			for _, err := range []error{inspect, chain, cow.Verify(path), cow.Merge(path+".merged", path)} {
				var corrupt *cow.CorruptError
				if !errors.As(err, &corrupt) || corrupt.Part != c.part || corrupt.Path != path {
					t.Errorf("%v, want damage of the %s", err, c.part)
				}
			}
			if _, err := os.Lstat(path + ".merged"); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("a failed merge leaves something: %v", err)
			}
		})
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
	check(t, ro.Flush())
	rw := open(t, "", nil, create(t, 16*block))
	for _, span := range [][2]int64{{16 * block, 1}, {16*block - 1, 2}, {-1, 1}, {1 << 62, 1}} {
		p := make([]byte, span[1])
		_, read := rw.ReadAt(p, span[0])
		_, write := rw.WriteAt(p, span[0])
		for _, err := range []error{read, write, rw.Discard(span[0], span[1])} {
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
					_, err := c.WriteAt(p, off)
					check(t, err)
					copy(flat[off:], p)
				case op < 13:
					check(t, c.Discard(off, n))
					clear(flat[off : off+n])
				case op < 16:
					p := make([]byte, n)
					_, err := c.ReadAt(p, off)
					check(t, err)
					if !bytes.Equal(p, flat[off:off+n]) {
						t.Fatalf("step %d: other bytes at %d", step, off)
					}
				case op < 17:
					check(t, c.Flush())
				default: // freeze the top, perhaps merge, go on with a new one
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
	if want := (cow.Info{VirtualSize: size, DataBlocks: 2, ZeroBlocks: 3}); err != nil || info != want {
		t.Errorf("%+v, %v, want %+v", info, err, want)
	}
	var stat unix.Stat_t
	check(t, unix.Stat(dst, &stat))
	if stat.Blocks*512 > 64<<10 {
		t.Errorf("%d bytes on disk", stat.Blocks*512)
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

func TestDiscardGivesRoomBack(t *testing.T) {
	path := create(t, 16<<20)
	c := open(t, "", nil, path)
	_, err := c.WriteAt(bytes.Repeat([]byte{1}, 8<<20), 0)
	check(t, err)
	check(t, c.Flush())
	check(t, c.Discard(0, 8<<20))
	check(t, c.Flush())
	var stat unix.Stat_t
	check(t, unix.Stat(path, &stat))
	if stat.Blocks*512 > 1<<20 {
		t.Errorf("%d bytes still on disk", stat.Blocks*512)
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
				switch rng.IntN(4) {
				case 0:
					err = c.Flush()
				case 1:
					clear(want[off : off+n])
					err = c.Discard(w*each*block+off, n)
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
	good := golden()
	f.Add(good)
	f.Add(good[:4096])
	f.Add([]byte("TORPCOW\n"))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, raw []byte) {
		path := write(t, "layer", raw)
		c, err := cow.OpenChain("", nil, path)
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
	})
}
