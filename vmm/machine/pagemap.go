package machine

import (
	"encoding/binary"
	"fmt"
	"os"

	"torpor/vmm/snapshot"
)

// Bits of an entry of /proc/self/pagemap (the kernel's Documentation/admin-guide/mm/pagemap.rst).
const (
	pagemapPresent = 1 << 63
	pagemapSwapped = 1 << 62
	pagemapFile    = 1 << 61 // file page or shared anonymous

	pagemapEntry = 8
	// pagemapStep is how many entries are read at a time.
	pagemapStep = 32 << 10
)

// touched returns, from /proc/self/pagemap, which pages of the flat image became anonymous: written, by the guest or by us, since the mapping was made.
//
// The mapping is private, so the first write to a page, whoever makes it, replaces the file's page by an anonymous one, and
// nothing else does. This is exact, costs nothing while the guest runs, and needs no tracking by KVM, whose dirty log misses
// what devices write. A swapped page was anonymous before; a page under migration looks swapped, which at worst is a page too many.
func (r *ram) touched(pagemap *os.File) (*pageSet, error) {
	set := newPageSet(r.pages())
	buf := make([]byte, pagemapStep*pagemapEntry)
	page := uint64(0)
	for i, region := range r.mem.Regions() {
		entry := int64(r.mem.HostAddr(i)) / snapshot.PageSize * pagemapEntry
		for left := len(region.Bytes) / snapshot.PageSize; left > 0; {
			b := buf[:min(left, pagemapStep)*pagemapEntry]
			if n, err := pagemap.ReadAt(b, entry); n < len(b) {
				return nil, fmt.Errorf("find written pages: %w", err)
			}
			for off := 0; off < len(b); off += pagemapEntry {
				if anonymous(binary.LittleEndian.Uint64(b[off:])) {
					set.add(page)
				}
				page++
			}
			entry += int64(len(b))
			left -= len(b) / pagemapEntry
		}
	}
	return set, nil
}

// anonymous reports whether an entry is of a page that no longer is the file's.
func anonymous(entry uint64) bool {
	return entry&pagemapFile == 0 && entry&(pagemapPresent|pagemapSwapped) != 0
}

// pageSet is a set of page numbers below a limit.
type pageSet struct {
	words []uint64
	limit uint64
}

func newPageSet(limit uint64) *pageSet {
	return &pageSet{words: make([]uint64, (limit+63)/64), limit: limit}
}

func (s *pageSet) add(page uint64)      { s.words[page/64] |= 1 << (page % 64) }
func (s *pageSet) has(page uint64) bool { return s.words[page/64]>>(page%64)&1 == 1 }

// addRange adds n pages.
func (s *pageSet) addRange(first, n uint64) {
	for page := first; page < first+n; page++ {
		s.add(page)
	}
}

// without is s without the pages of o, a set with the same limit.
func (s *pageSet) without(o *pageSet) *pageSet {
	out := newPageSet(s.limit)
	for i, w := range s.words {
		out.words[i] = w &^ o.words[i]
	}
	return out
}

// runs calls f for every maximal run of pages, cut at multiples of chunk pages, in ascending order.
func (s *pageSet) runs(chunk uint64, f func(first, n uint64) error) error {
	for page := uint64(0); page < s.limit; {
		if s.words[page/64] == 0 {
			page = (page/64 + 1) * 64
			continue
		}
		if !s.has(page) {
			page++
			continue
		}
		first, end := page, min(s.limit, (page/chunk+1)*chunk)
		for page < end && s.has(page) {
			page++
		}
		if err := f(first, page-first); err != nil {
			return err
		}
	}
	return nil
}

// any reports whether one of the n pages from first on is in the set.
func (s *pageSet) any(first, n uint64) bool {
	for page := first; page < first+n; page++ {
		if s.has(page) {
			return true
		}
	}
	return false
}
