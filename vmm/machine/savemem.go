package machine

import (
	"bytes"
	"os"

	"torpor/vmm/snapshot"
)

// chunkPages is how many pages are looked at together.
const chunkPages = snapshot.ChunkBytes / snapshot.PageSize

var zeroPage [snapshot.PageSize]byte

// writeFull writes all memory as a flat image. Zero pages become holes. It returns the checksums of the image's chunks. Memory
// that nobody wrote, over nothing or over a hole of the base, is zero without being looked at: reading it would fill the page
// cache with as much as the guest has.
func (r *ram) writeFull(from source, f *os.File, maybe *pageSet, pace *pace) (saved Saved, sums []uint32, err error) {
	if err := f.Truncate(int64(r.mem.Size())); err != nil {
		return saved, nil, err
	}
	size, data := r.mem.Size(), uint64(0) // from the current offset to data the base has no data
	for first := uint64(0); first < r.pages(); first += chunkPages {
		n := min(chunkPages, r.pages()-first)
		off := first * snapshot.PageSize
		if r.from.base != nil && data <= off {
			data = snapshot.NextData(r.from.base, off, size)
		}
		if !maybe.any(first, n) && (r.from.base == nil || data >= off+n*snapshot.PageSize) {
			sums = append(sums, snapshot.ZeroSum(int(n)*snapshot.PageSize))
			saved.ZeroPages += n
			continue
		}
		pace.wait(int(n) * snapshot.PageSize)
		err := from.read([]pageRange{{first, n}}, func(b [][]byte) error {
			return guarded(b[0], func() error {
				stored, err := writeNonZero(f, b[0], first)
				saved.DataPages += stored
				saved.ZeroPages += n - stored
				sums = append(sums, snapshot.Checksum(b[0]))
				return err
			})
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

// written returns every page that may differ from the base: those touched, and those mapped from a layer.
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
