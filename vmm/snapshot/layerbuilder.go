package snapshot

import (
	"fmt"
	"io"
)

// LayerBuilder lays out a memory layer: first all runs are added, in ascending order, which gives each its place in the file. Then
// whoever builds it writes their data there, in any order and by as many goroutines as it likes, and sets their checksums. Finish
// writes the table and the header.
type LayerBuilder struct {
	Runs []Run // as added; to be read, and Sum to be set
	info LayerInfo
	off  uint64 // where the next data goes
}

// NewLayerBuilder starts a layer. Of info it takes what is not counted.
func NewLayerBuilder(info LayerInfo) *LayerBuilder {
	return &LayerBuilder{off: dataStart, info: LayerInfo{
		Version: LayerVersion, ID: info.ID, MemoryBytes: info.MemoryBytes, Base: info.Base, Parent: info.Parent, Replaces: info.Replaces,
	}}
}

// Add adds pages of one kind, cut into runs that lie within one chunk of memory each.
func (b *LayerBuilder) Add(kind RunKind, page, pages uint64) error {
	next := uint64(0)
	if n := len(b.Runs); n > 0 {
		next = b.Runs[n-1].End()
	}
	if pages == 0 || page < next || page+pages > b.info.MemoryBytes/PageSize || page+pages < page {
		return fmt.Errorf("write memory layer: pages %d+%d are out of order or not in memory", page, pages)
	}
	for pages > 0 {
		r := Run{Page: page, Pages: uint32(min(pages, chunkPages-page%chunkPages)), Kind: kind}
		if kind == RunData {
			r.Offset = b.off
			b.off += uint64(r.Bytes())
		}
		b.info.count(r)
		b.Runs = append(b.Runs, r)
		page, pages = r.End(), pages-uint64(r.Pages)
	}
	return nil
}

// FileBytes is the length of the file, to be.
func (b *LayerBuilder) FileBytes() uint64 { return b.off + uint64(len(b.Runs))*runBytes }

// Finish writes the table and the header. The file is complete, but not yet durable.
func (b *LayerBuilder) Finish(w io.WriterAt) (LayerInfo, error) {
	var table encoder
	for _, r := range b.Runs {
		r.appendTo(&table)
	}
	header := layerHeader{
		version: b.info.Version, runs: uint32(len(b.Runs)), memoryBytes: b.info.MemoryBytes, tableOff: b.off, id: b.info.ID,
		tableSum: Checksum(table), base: b.info.Base, parent: b.info.Parent, replaces: b.info.Replaces,
	}.encode()
	if len(table) > 0 {
		if _, err := w.WriteAt(table, int64(b.off)); err != nil {
			return b.info, fmt.Errorf("write memory layer: %w", err)
		}
	}
	// The header's page is written whole: there is nothing between it and the data.
	if _, err := w.WriteAt(append(header, make([]byte, dataStart-len(header))...), 0); err != nil {
		return b.info, fmt.Errorf("write memory layer: %w", err)
	}
	b.info.Digest, b.info.FileBytes = layerDigest(header, table), b.FileBytes()
	return b.info, nil
}
