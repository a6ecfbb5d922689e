package snapcache

import (
	"fmt"
	"os"

	"torpor/vmm/snapshot"
)

// layerSum reads a memory layer whole.
func layerSum(f *os.File) (Sum, error) {
	d, err := snapshot.OpenLayer(f, "the memory layer")
	if err != nil {
		return Sum{}, err
	}
	if err := d.Verify(); err != nil {
		return Sum{}, err
	}
	return Sum{Layer: d.Info.Digest.String()}, nil
}

// flatSum reads a flat memory; its holes are zeros and are not read.
func flatSum(f *os.File) (Sum, error) {
	info, err := f.Stat()
	if err != nil {
		return Sum{}, err
	}
	size := uint64(info.Size())
	buf := make([]byte, snapshot.ChunkBytes)
	var sums []uint32
	for off := uint64(0); off < size; off += snapshot.ChunkBytes {
		b := buf[:min(snapshot.ChunkBytes, size-off)]
		if snapshot.NextData(f, off, size) >= off+uint64(len(b)) {
			sums = append(sums, snapshot.ZeroSum(len(b)))
			continue
		}
		if n, err := f.ReadAt(b, int64(off)); n < len(b) {
			return Sum{}, fmt.Errorf("read the memory at %d: %w", off, err)
		}
		sums = append(sums, snapshot.Checksum(b))
	}
	return Sum{Flat: snapshot.BaseDigest(size, sums).String()}, nil
}
