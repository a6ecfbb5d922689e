package snapshot_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"torpor/vmm/snapshot"
)

const mergePages = memoryBytes / snapshot.PageSize

// chainFiles writes n random layers that lie upon one another and returns them, with the value of each page up to each.
func chainFiles(t *testing.T, rng *rand.Rand, n int) (files []*os.File, want [][]byte) {
	t.Helper()
	parent, values := sampleBase, bytes.Repeat([]byte{0xee}, mergePages) // 0xee: as in the base
	for i := range n {
		f, err := os.Create(filepath.Join(t.TempDir(), fmt.Sprint(i)))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		var runs []run
		for page := rng.Uint64N(100); page < mergePages; page += rng.Uint64N(120) {
			r := run{snapshot.RunKind(1 + rng.Uint32N(3)), page, min(1+rng.Uint64N(300), mergePages-page), byte(10*i + rng.IntN(10) + 1)}
			runs = append(runs, r)
			value := map[snapshot.RunKind]byte{snapshot.RunData: r.value, snapshot.RunZero: 0, snapshot.RunBase: 0xee}[r.kind]
			for p := page; p < page+r.pages; p++ {
				values[p] = value
			}
			page += r.pages
		}
		parent = build(t, f, snapshot.LayerInfo{ID: snapshot.ID{byte(i)}, MemoryBytes: memoryBytes, Base: sampleBase, Parent: parent}, runs...).Name()
		files, want = append(files, f), append(want, bytes.Clone(values))
	}
	return files, want
}

// valuesOf reads the value of each page through the run tables of layers.
func valuesOf(t *testing.T, files []*os.File) []byte {
	t.Helper()
	var layers []*snapshot.Layer
	for i, f := range files {
		l, err := snapshot.OpenLayer(f, snapshot.LayerLabel(i))
		if err == nil {
			err = l.Verify()
		}
		if err != nil {
			t.Fatal(err)
		}
		layers = append(layers, l)
	}
	if err := snapshot.CheckChain(sampleBase, layers); err != nil {
		t.Fatal(err)
	}
	values := bytes.Repeat([]byte{0xee}, mergePages)
	reader := snapshot.NewPieceReader(layers)
	for _, p := range snapshot.Overlay(layers) {
		data := make([]byte, p.Pages*snapshot.PageSize)
		switch p.Kind {
		case snapshot.RunData:
			if err := reader.Read(p, data); err != nil {
				t.Fatal(err)
			}
		case snapshot.RunBase:
			data = bytes.Repeat([]byte{0xee}, len(data))
		}
		for i := range p.Pages {
			page := data[i*snapshot.PageSize : (i+1)*snapshot.PageSize]
			if !bytes.Equal(page, bytes.Repeat(page[:1], snapshot.PageSize)) {
				t.Fatalf("page %d is mixed", p.Page+i)
			}
			values[p.Page+i] = page[0]
		}
	}
	return values
}

func mergeFiles(t *testing.T, files []*os.File) (*os.File, snapshot.LayerInfo, error) {
	t.Helper()
	dst, err := os.Create(filepath.Join(t.TempDir(), "merged"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dst.Close() })
	info, err := snapshot.Merge(dst, files...)
	return dst, info, err
}

// Any layers that follow each other can be replaced by what they are merged to, and the memory is the same.
func TestMergeIsTheSameMemory(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	for range 20 {
		files, want := chainFiles(t, rng, 1+rng.IntN(5))
		all := want[len(want)-1]
		if got := valuesOf(t, files); !bytes.Equal(got, all) {
			t.Fatal("the layers themselves are not what was written")
		}
		from := rng.IntN(len(files))
		to := from + 1 + rng.IntN(len(files)-from)
		dst, info, err := mergeFiles(t, files[from:to])
		if err != nil {
			t.Fatal(err)
		}
		shorter := append(append(append([]*os.File{}, files[:from]...), dst), files[to:]...)
		if got := valuesOf(t, shorter); !bytes.Equal(got, all) {
			t.Fatalf("layers %d to %d of %d merged: another memory", from, to, len(files))
		}
		if from == 0 && info.BasePages > 0 {
			t.Errorf("%d pages as in the base, right over it", info.BasePages)
		}
		if again, _, err := mergeFiles(t, shorter); err != nil || !bytes.Equal(valuesOf(t, []*os.File{again}), all) {
			t.Fatalf("merged again: another memory, or %v", err)
		}
	}
}

func TestMergeRefusesWhatDoesNotFitTogether(t *testing.T) {
	files, _ := chainFiles(t, rand.New(rand.NewPCG(9, 10)), 3)
	for name, c := range map[string]struct {
		files []*os.File
		part  string
	}{
		"backwards": {[]*os.File{files[1], files[0]}, "memory layer 2, header"},
		"a gap":     {[]*os.File{files[0], files[2]}, "memory layer 2, header"},
	} {
		_, _, err := mergeFiles(t, c.files)
		var typed *snapshot.Error
		if !errors.As(err, &typed) || typed.Part != c.part || !errors.Is(err, snapshot.ErrMismatch) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, _, err := mergeFiles(t, nil); err == nil {
		t.Error("nothing was merged")
	}
}

// A flipped byte is found by the merge or by who reads what it made: it never gets a right checksum.
func TestMergeKeepsDamage(t *testing.T) {
	files, _ := chainFiles(t, rand.New(rand.NewPCG(11, 12)), 3)
	l := open(t, files[1])
	for _, r := range l.Runs {
		if r.Kind != snapshot.RunData {
			continue
		}
		b := make([]byte, 1)
		at := int64(r.Offset) + int64(r.Bytes())/2
		flip := func() {
			if _, err := files[1].ReadAt(b, at); err != nil {
				t.Fatal(err)
			}
			b[0] ^= 1
			if _, err := files[1].WriteAt(b, at); err != nil {
				t.Fatal(err)
			}
		}
		flip()
		dst, _, err := mergeFiles(t, files)
		if err == nil {
			if _, err = snapshot.VerifyLayer(dst.Name(), "merged"); err == nil {
				// The page was covered: then nothing of it may be left.
				flip()
				want := valuesOf(t, files)
				if got := valuesOf(t, []*os.File{dst}); !bytes.Equal(got, want) {
					t.Fatalf("a flipped byte of pages %d-%d got into a layer that verifies", r.Page, r.End()-1)
				}
				continue
			}
		}
		if !errors.Is(err, snapshot.ErrChecksum) || !strings.Contains(err.Error(), "pages ") {
			t.Errorf("pages %d-%d: %v", r.Page, r.End()-1, err)
		}
		flip()
	}
}

// Chains of many tiny runs stay as cheap to map as what they hold, and merging does not make them longer.
func TestMergeOfManyTinyRuns(t *testing.T) {
	var files []*os.File
	parent := sampleBase
	for i := range uint64(2) { // even pages, then odd ones
		f, err := os.Create(filepath.Join(t.TempDir(), fmt.Sprint(i)))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		var runs []run
		for page := i; page < mergePages; page += 2 {
			runs = append(runs, run{snapshot.RunData, page, 1, byte(i + 1)})
		}
		parent = build(t, f, snapshot.LayerInfo{MemoryBytes: memoryBytes, Base: sampleBase, Parent: parent}, runs...).Name()
		files = append(files, f)
	}
	dst, info, err := mergeFiles(t, files)
	if err != nil {
		t.Fatal(err)
	}
	if l := open(t, dst); len(l.Runs) != 4 || info.DataPages != mergePages {
		t.Errorf("%d runs of %d pages", len(l.Runs), info.DataPages)
	}
}
