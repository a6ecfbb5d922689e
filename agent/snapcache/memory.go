package snapcache

import (
	"context"
	"errors"
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

// MergeMemory writes one memory layer into the draft, under the given name, that stands for all of another snapshot's. It is durable
// when it returns. Once begun it is finished whatever becomes of ctx.
func (d *Draft) MergeMemory(ctx context.Context, from *Snapshot, name string) (_ Sum, err error) {
	if err := ctx.Err(); err != nil {
		return Sum{}, err
	}
	dst, err := os.OpenFile(d.Path(name), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return Sum{}, err
	}
	defer func() { err = errors.Join(err, dst.Close()) }()
	var layers []*os.File
	for _, l := range from.Manifest.Memory {
		f, err := os.Open(from.Path(l))
		if err != nil {
			return Sum{}, &PartError{from.Dir, l, err.Error()}
		}
		defer f.Close()
		layers = append(layers, f)
	}
	info, err := snapshot.Merge(dst, layers...)
	return Sum{Layer: info.Digest.String()}, err
}
