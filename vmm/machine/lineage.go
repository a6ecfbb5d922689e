package machine

import (
	"cmp"
	"os"
	"slices"

	"torpor/vmm/snapshot"
)

// lineage says what the files a machine was restored from hold for each page: the base, and in places a layer or zeros over it.
// Nothing changes it.
type lineage struct {
	size    uint64 // of memory, in bytes
	base    *os.File
	layers  []*os.File
	origins []origin // ascending; a page in none is as in the base
	name    snapshot.Digest
}

// origin is a sequence of pages that some layer holds.
type origin struct {
	page, pages uint64
	layer       int // index; -1: the pages are zero
	offset      uint64
}

func (o origin) end() uint64 { return o.page + o.pages }

// addPiece adds what a layer holds. Pieces come in ascending order.
func (l *lineage) addPiece(p snapshot.Piece, layers []*snapshot.Layer) {
	o := origin{page: p.Page, pages: p.Pages, layer: -1}
	if p.Kind == snapshot.RunData {
		o.layer, o.offset = p.Layer, p.Offset(layers)
	}
	if n := len(l.origins); n > 0 {
		last := &l.origins[n-1]
		inFile := o.layer < 0 || last.offset+last.pages*snapshot.PageSize == o.offset
		if last.end() == o.page && last.layer == o.layer && inFile {
			last.pages += o.pages
			return
		}
	}
	l.origins = append(l.origins, o)
}

// each calls f for what n pages from first on are made of. file is nil for zeros.
func (l *lineage) each(first, n uint64, f func(page, n uint64, file *os.File, offset uint64) error) error {
	i, _ := slices.BinarySearchFunc(l.origins, first, func(o origin, page uint64) int { return cmp.Compare(o.end(), page+1) })
	for end := first + n; first < end; i++ {
		next := end
		if i < len(l.origins) {
			next = min(end, l.origins[i].page)
		}
		if first < next {
			if err := f(first, next-first, l.base, first*snapshot.PageSize); err != nil {
				return err
			}
			first = next
		}
		if i == len(l.origins) || first == end {
			continue
		}
		o := l.origins[i]
		stop := min(end, o.end())
		var file *os.File
		if o.layer >= 0 {
			file = l.layers[o.layer]
		}
		if err := f(first, stop-first, file, o.offset+(first-o.page)*snapshot.PageSize); err != nil {
			return err
		}
		first = stop
	}
	return nil
}

// isHole reports whether n bytes of the base at off are zeros that need not be read.
func (l *lineage) isHole(file *os.File, off, n uint64) bool {
	return file == l.base && snapshot.NextData(file, off, l.size) >= off+n
}

func (l *lineage) close() { closeFiles(append(l.layers, l.base)...) }
