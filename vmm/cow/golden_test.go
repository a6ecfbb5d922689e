package cow_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"torpor/vmm/cow"
)

// The layers in testdata were written by hand after FORMAT.md, by other code than this, and never change: a disk of 4 blocks, of
// which block 0 is not in the layer, 1 and 3 are data, and 2 is zero. Today's code reads them for ever.
var goldenInfo = map[string]cow.Info{
	"v1.layer":             {Version: 1, VirtualSize: 4 * block, DataBlocks: 2, ZeroBlocks: 1},
	"v2.layer":             {Version: 2, VirtualSize: 4 * block, DataBlocks: 2, ZeroBlocks: 1},
	"v2.sealed.layer":      {Version: 2, VirtualSize: 4 * block, DataBlocks: 2, ZeroBlocks: 1, Sealed: true},
	"v2.half-sealed.layer": {Version: 2, VirtualSize: 4 * block, DataBlocks: 2, ZeroBlocks: 1},
}

func goldenFile(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	check(t, err)
	return b
}

var (
	goldenOne   = bytes.Repeat([]byte("data"), block/4)
	goldenThree = func() []byte {
		p := make([]byte, block)
		for i := range p {
			p[i] = byte(i)
		}
		return p
	}()
)

// goldenDisk is what a golden layer makes of a base full of sevens.
func goldenDisk() []byte {
	return bytes.Join([][]byte{bytes.Repeat([]byte{7}, block), goldenOne, make([]byte, block), goldenThree}, nil)
}

func TestGoldenLayersAreRead(t *testing.T) {
	base := write(t, "base", bytes.Repeat([]byte{7}, 4*block))
	for name, want := range goldenInfo {
		path := write(t, "layer", goldenFile(t, name))
		if info, err := cow.Inspect(path); err != nil || info != want {
			t.Errorf("%s: %+v, %v", name, info, err)
		}
		if err := cow.Verify(path); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got := contents(t, open(t, base, []string{path}, "")); !bytes.Equal(got, goldenDisk()) {
			t.Errorf("%s: other bytes", name)
		}
		merged := filepath.Join(t.TempDir(), "merged")
		check(t, cow.Merge(merged, path))
		if got, err := os.ReadFile(merged); err != nil || !bytes.Equal(got, goldenFile(t, "v2.sealed.layer")) {
			t.Errorf("%s: merged, it is not the sealed layer: %v", name, err)
		}
	}
}

func TestGoldenLayersAreWritten(t *testing.T) {
	path := create(t, 4*block)
	c := open(t, "", nil, path)
	for _, b := range []int64{1, 2, 3} {
		_, err := c.WriteAt(map[int64][]byte{1: goldenOne, 2: goldenOne, 3: goldenThree}[b], b*block)
		check(t, err)
	}
	check(t, c.Discard(2*block, block))
	check(t, c.Flush())
	check(t, c.Close())
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, goldenFile(t, "v2.layer")) {
		t.Errorf("the written layer differs from the golden one: %v", err)
	}
	for range 2 { // the second time there is nothing to do
		check(t, cow.Seal(path))
		if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, goldenFile(t, "v2.sealed.layer")) {
			t.Errorf("the sealed layer differs from the golden one: %v", err)
		}
	}
	half := write(t, "layer", goldenFile(t, "v2.half-sealed.layer"))
	check(t, cow.Seal(half))
	if got, err := os.ReadFile(half); err != nil || !bytes.Equal(got, goldenFile(t, "v2.sealed.layer")) {
		t.Errorf("a sealing taken up again differs: %v", err)
	}
}

// What was sealed, or begun to be, is not written again. Version 1 has no seals, but can be written on.
func TestSealedLayersAreNotWritten(t *testing.T) {
	for name := range goldenInfo {
		path := write(t, "layer", goldenFile(t, name))
		before := goldenFile(t, name)
		c, err := cow.OpenChain("", nil, path)
		if name == "v1.layer" || name == "v2.layer" {
			check(t, err)
			_, err := c.WriteAt([]byte("x"), 0)
			check(t, err)
			check(t, c.Flush())
			check(t, c.Close())
			check(t, cow.Verify(path))
			continue
		}
		if !errors.Is(err, cow.ErrSealed) {
			t.Errorf("%s: opened to be written: %v", name, err)
		}
		if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, before) {
			t.Errorf("%s: changed: %v", name, err)
		}
	}
	path := write(t, "layer", goldenFile(t, "v1.layer"))
	check(t, cow.Seal(path))
	if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, goldenFile(t, "v1.layer")) {
		t.Errorf("sealing changed a layer of version 1: %v", err)
	}
	top := create(t, 4*block)
	c := open(t, "", nil, top)
	if err := cow.Seal(top); !errors.Is(err, cow.ErrInUse) {
		t.Errorf("sealed under a writer: %v", err)
	}
	c.Close()
}

// Every byte of a sealed layer counts, but those FORMAT.md calls void.
func TestFlippedBitsInASealedLayer(t *testing.T) {
	good := goldenFile(t, "v2.sealed.layer")
	void := func(at int) bool {
		const data, sums = 2 * block, 6 * block
		return at >= data && at < data+block || at >= data+2*block && at < data+3*block || // blocks 0 and 2 are no data
			at >= sums && at < sums+4 || at >= sums+8 && at < sums+12 || at >= sums+16 && at < sums+block // nor have they sums
	}
	path := filepath.Join(t.TempDir(), "layer")
	check(t, os.WriteFile(path, good, 0o600))
	f := openRW(t, path)
	defer f.Close()
	for at := 0; at < len(good); at += 1 + at%29 {
		_, err := f.WriteAt([]byte{good[at] ^ 1<<(at%8)}, int64(at))
		check(t, err)
		err = cow.Verify(path)
		_, restore := f.WriteAt(good[at:at+1], int64(at))
		check(t, restore)
		if void(at) {
			if err != nil {
				t.Errorf("byte %d, which is void: %v", at, err)
			}
			continue
		}
		var corrupt *cow.CorruptError
		if !errors.As(err, &corrupt) {
			t.Errorf("byte %d: %v", at, err)
		}
	}
}
