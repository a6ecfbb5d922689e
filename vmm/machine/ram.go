package machine

import (
	"fmt"
	"os"
	"sync"

	"torpor/vmm/guestmem"
	"torpor/vmm/snapshot"
	"torpor/vmm/x86"
)

// ram is the guest's memory and where it came from. Pages are counted as in a flat image: ascending, without the hole.
//
// Memory of a cold boot is anonymous. Restored memory maps its base image copy-on-write, with the long runs of its layers mapped
// over it from their files; short runs were copied in. So a page that is not anonymous (package comment of pagemap.go) is what the
// file below it has. For most pages that is what the chain of layers holds; for those that were copied in, or were given back by
// the guest, it is the base's: they are detached.
//
// What a layer over the chain must contain is therefore the pages that became anonymous, and the detached ones that are not any
// more: as in the base. A layer over the base alone needs instead, besides the anonymous pages, those still mapped from a layer:
// inherited.
type ram struct {
	mem        *guestmem.Memory
	from       lineage // its base is nil: anonymous memory
	baseDigest snapshot.Digest

	prefetch *prefetch // nil: none
	mapped   *unverified
	verifier *verifier // nil: nothing is mapped that would have to be verified

	// mu guards what a balloon changes while the guest runs.
	mu        sync.Mutex
	inherited []pageRange // ascending
	detached  *pageSet    // nil: none
	rebased   int         // pieces mapped from the base again
}

// detach notes that pages are mapped from the base although the chain has them otherwise. Preconditions: mu, or nobody else yet.
func (r *ram) detach(p pageRange) {
	if r.detached == nil {
		r.detached = newPageSet(r.pages())
	}
	r.detached.addRange(p.first, p.n)
}

// pageRange is a run of pages of the flat image.
type pageRange struct{ first, n uint64 }

func newRAM(size uint64, mapPart func(off int64, size uint64) ([]byte, error)) (_ *ram, err error) {
	var regions []guestmem.Region
	unmap := func() {
		for _, r := range regions {
			_ = guestmem.Unmap(r.Bytes)
		}
	}
	off := int64(0)
	for _, r := range x86.RAM(size) {
		b, err := mapPart(off, r.Size)
		if err != nil {
			unmap()
			return nil, err
		}
		regions = append(regions, guestmem.Region{GPA: guestmem.Addr(r.Addr), Bytes: b})
		off += int64(r.Size)
	}
	mem, err := guestmem.New(regions)
	if err != nil {
		unmap()
		return nil, err
	}
	return &ram{mem: mem}, nil
}

// newAnonymousRAM is the memory of a cold boot.
func newAnonymousRAM(size uint64) (*ram, error) {
	return newRAM(size, func(_ int64, n uint64) ([]byte, error) { return guestmem.MapAnon(n) })
}

// newRestoredRAM maps the flat image in f, which becomes the memory's unless there is an error: a diff is made against it.
func newRestoredRAM(f *os.File, size uint64) (_ *ram, err error) {
	info, err := f.Stat()
	if err == nil && uint64(info.Size()) != size {
		err = &snapshot.Error{Part: "base memory", Err: fmt.Errorf("%w: %d bytes, want %d", snapshot.ErrFormat, info.Size(), size)}
	}
	var r *ram
	if err == nil {
		r, err = newRAM(size, func(off int64, n uint64) ([]byte, error) { return guestmem.MapPrivate(int(f.Fd()), off, n) })
	}
	if err != nil {
		return nil, err
	}
	r.from = lineage{size: size, base: f}
	return r, nil
}

func (r *ram) close() {
	r.prefetch.end()
	r.verifier.end()
	for _, region := range r.mem.Regions() {
		_ = guestmem.Unmap(region.Bytes)
	}
	r.from.close()
}

// pages is the number of pages of the flat image.
func (r *ram) pages() uint64 { return r.mem.Size() / snapshot.PageSize }

// slice returns the longest run of memory that starts at the given page, is at most n pages and lies in one region.
func (r *ram) slice(page, n uint64) []byte {
	off := page * snapshot.PageSize
	for _, region := range r.mem.Regions() {
		size := uint64(len(region.Bytes))
		if off < size {
			return region.Bytes[off:min(size, off+n*snapshot.PageSize)]
		}
		off -= size
	}
	return nil
}

// guarded runs f over guest memory b. A page that cannot be read (its file was cut short) is an error, not a crash.
func guarded(b []byte, f func() error) error {
	var err error
	if !guestmem.Guard(b, func() { err = f() }) {
		return &snapshot.Error{Part: "memory", Err: guestmem.ErrFault}
	}
	return err
}
