package machine

import (
	"bytes"
	"fmt"
	"os"

	"torpor/vmm/snapshot"
)

// chunkPages is how many pages are looked at together.
const chunkPages = snapshot.ChunkBytes / snapshot.PageSize

var zeroPage [snapshot.PageSize]byte

// writeFull writes all memory as a flat image. Zero pages become holes. It returns the checksums of the image's chunks. Memory
// that nobody wrote, over nothing or over a hole of the base, is zero without being looked at: reading it would fill the page
// cache with as much as the guest has.
func (r *ram) writeFull(from source, f *os.File, maybe *pageSet) (saved Saved, sums []uint32, err error) {
	if err := f.Truncate(int64(r.mem.Size())); err != nil {
		return saved, nil, err
	}
	size, data := r.mem.Size(), uint64(0) // from the current offset to data the base has no data
	for first := uint64(0); first < r.pages(); first += chunkPages {
		n := min(chunkPages, r.pages()-first)
		off := first * snapshot.PageSize
		if r.base != nil && data <= off {
			data = snapshot.NextData(r.base, off, size)
		}
		if !maybe.any(first, n) && (r.base == nil || data >= off+n*snapshot.PageSize) {
			sums = append(sums, snapshot.ZeroSum(int(n)*snapshot.PageSize))
			saved.ZeroPages += n
			continue
		}
		err := from.read([]pageRange{{first, n}}, func(_ pageRange, chunk []byte) error {
			stored, err := writeNonZero(f, chunk, first)
			saved.DataPages += stored
			saved.ZeroPages += n - stored
			sums = append(sums, snapshot.Checksum(chunk))
			return err
		})
		if err != nil {
			return saved, nil, err
		}
	}
	return saved, sums, nil
}

// writeNonZero writes the runs of pages of a chunk that are not zero to their place in the file.
func writeNonZero(f *os.File, chunk []byte, first uint64) (pages uint64, err error) {
	const page = snapshot.PageSize
	for off := 0; off < len(chunk); {
		if isZero(chunk[off : off+page]) {
			off += page
			continue
		}
		start := off
		for off < len(chunk) && !isZero(chunk[off:off+page]) {
			off += page
		}
		if _, err := f.WriteAt(chunk[start:off], int64(first*page)+int64(start)); err != nil {
			return pages, err
		}
		pages += uint64(off-start) / page
	}
	return pages, nil
}

func isZero(page []byte) bool { return bytes.Equal(page, zeroPage[:]) }

// written returns every page that may differ from the base: those touched, and those mapped from an earlier diff.
func (r *ram) written(pagemap *os.File) (*pageSet, error) {
	set, err := r.touched(pagemap)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	inherited := r.inherited // nothing changes it: the devices are paused
	r.mu.Unlock()
	for _, run := range inherited {
		for page := run.first; page < run.first+run.n; page++ {
			set.add(page)
		}
	}
	return set, nil
}

// writeDiff writes the pages that differ from the base image.
func (r *ram) writeDiff(from source, f *os.File, candidates *pageSet, id snapshot.ID) (Saved, error) {
	var saved Saved
	w := snapshot.NewDiffWriter(f, id, r.mem.Size())
	base := make([]byte, snapshot.ChunkBytes)
	err := candidates.batches(chunkPages, func(runs []pageRange) error {
		return from.read(runs, func(run pageRange, now []byte) error {
			was := base[:len(now)]
			if got, err := r.base.ReadAt(was, int64(run.first*snapshot.PageSize)); got < len(was) {
				return fmt.Errorf("read base memory: %w", err)
			}
			elided, err := diffRun(w, run.first, now, was)
			saved.ElidedPages += elided
			return err
		})
	})
	if err != nil {
		return saved, err
	}
	info, err := w.Finish()
	saved.DataPages, saved.ZeroPages, saved.Memory = info.DataPages, info.ZeroPages, info.Digest
	return saved, err
}

// verdict is what becomes of a page of a diff.
type verdict int

const (
	elide verdict = iota // as in the base
	zero
	store
)

func judge(now, was []byte) verdict {
	switch {
	case bytes.Equal(now, was):
		return elide
	case isZero(now):
		return zero
	}
	return store
}

// diffRun writes one run of pages, whose contents were was in the base.
func diffRun(w *snapshot.DiffWriter, first uint64, now, was []byte) (elided uint64, err error) {
	const page = snapshot.PageSize
	for off := 0; off < len(now); {
		v, start := judge(now[off:off+page], was[off:off+page]), off
		for off += page; off < len(now) && judge(now[off:off+page], was[off:off+page]) == v; off += page {
		}
		at, n := first+uint64(start)/page, uint64(off-start)/page
		switch v {
		case elide:
			elided += n
		case zero:
			err = w.Zero(at, n)
		case store:
			err = w.Data(at, now[start:off])
		}
		if err != nil {
			return elided, err
		}
	}
	return elided, nil
}
