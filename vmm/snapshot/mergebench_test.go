package snapshot_test

import (
	"os"
	"path/filepath"
	"testing"

	"torpor/vmm/snapshot"
)

// BenchmarkMerge merges two layers of 256 MiB, of which the newer covers every other MiB of the older.
func BenchmarkMerge(b *testing.B) {
	const memory = 512 << 20
	pages := uint64(snapshot.ChunkBytes / snapshot.PageSize)
	var files []*os.File
	parent := sampleBase
	for i := range uint64(2) {
		f, err := os.Create(filepath.Join(b.TempDir(), "layer"))
		if err != nil {
			b.Fatal(err)
		}
		defer f.Close()
		var runs []run
		for n := range uint64(256) {
			runs = append(runs, run{snapshot.RunData, n * (1 + i) * pages, pages, byte(n)}) // within memory: the last is the MiB 510
		}
		parent = build(b, f, snapshot.LayerInfo{MemoryBytes: memory, Base: sampleBase, Parent: parent}, runs...).Name()
		files = append(files, f)
	}
	dir := b.TempDir()
	b.ResetTimer()
	for b.Loop() {
		dst, err := os.OpenFile(filepath.Join(dir, "merged"), os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o600)
		if err != nil {
			b.Fatal(err)
		}
		info, err := snapshot.Merge(dst, files...)
		if err != nil {
			b.Fatal(err)
		}
		b.SetBytes(int64(info.FileBytes))
		dst.Close()
	}
}
