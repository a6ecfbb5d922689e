package machine

import (
	"cmp"
	"slices"

	"torpor/vmm/guestmem"
	"torpor/vmm/snapshot"
)

// maxRebased bounds how many pieces of memory are mapped anew for the guest's sake: each can cost two mappings, of which a
// process has few (maxMappings), and the guest decides where the pieces lie.
const maxRebased = 4000

// Discard gives pages back to the host as guestmem.Memory.Discard does. Where memory is mapped from a layer, what lies below it is
// that layer's data, which would be kept for ever though nobody wants it: long enough pieces of it are mapped from the base
// instead, which the next layer only notes.
func (r *ram) Discard(a guestmem.Addr, n uint64) (uint64, error) {
	if r.from.base != nil && n >= mapBytes {
		r.rebase(a, n)
	}
	return r.mem.Discard(a, n)
}

// rebase maps the inherited pages within a range from the base. What it cannot map stays inherited.
func (r *ram) rebase(a guestmem.Addr, n uint64) {
	end := a + guestmem.Addr(n)
	if end < a {
		end = ^guestmem.Addr(0)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	page := uint64(0) // of the flat image, where the region starts
	for _, region := range r.mem.Regions() {
		size := uint64(len(region.Bytes))
		first, last := max(a, region.GPA), min(end, region.GPA+guestmem.Addr(size))
		if first < last {
			from := (uint64(first-region.GPA) + snapshot.PageSize - 1) / snapshot.PageSize
			to := uint64(last-region.GPA) / snapshot.PageSize
			r.rebasePagesLocked(page+from, page+to)
		}
		page += size / snapshot.PageSize
	}
}

// rebasePagesLocked is rebase for pages first to end, end excluded, of the flat image. They lie in one region.
func (r *ram) rebasePagesLocked(first, end uint64) {
	i, _ := slices.BinarySearchFunc(r.inherited, first, func(run pageRange, page uint64) int {
		return cmp.Compare(run.first+run.n, page+1) // the first run that ends behind page
	})
	for i < len(r.inherited) && r.inherited[i].first < end {
		run := r.inherited[i]
		piece := pageRange{max(run.first, first), 0}
		piece.n = min(run.first+run.n, end) - piece.first
		if piece.n*snapshot.PageSize < mapBytes || r.rebased >= maxRebased || r.mapBase(piece) != nil {
			i++
			continue
		}
		r.rebased++
		r.detach(piece)
		var rest []pageRange
		if before := piece.first - run.first; before > 0 {
			rest = append(rest, pageRange{run.first, before})
		}
		if after := run.first + run.n - piece.first - piece.n; after > 0 {
			rest = append(rest, pageRange{piece.first + piece.n, after})
		}
		r.inherited = slices.Replace(r.inherited, i, i+1, rest...)
		i += len(rest)
	}
}
