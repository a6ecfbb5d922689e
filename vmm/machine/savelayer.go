package machine

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"torpor/vmm/snapshot"
)

// saveWorkers is how many goroutines look at memory and write it: as many writes are under way at once.
const saveWorkers = 4

// layerPlan says which pages a layer may have, and what it lies upon.
type layerPlan struct {
	written *pageSet // to be compared with below
	based   *pageSet // as in the base, where below has something else; nil for none
	below   *lineage
}

// planLayer finds the pages a layer may have. Memory must be at rest.
func (r *ram) planLayer(kind SaveKind, pagemap *os.File) (*layerPlan, error) {
	if kind == SaveCumulative {
		written, err := r.written(pagemap)
		return &layerPlan{written: written, below: &lineage{size: r.from.size, base: r.from.base, name: r.baseDigest}}, err
	}
	written, err := r.touched(pagemap)
	if err != nil {
		return nil, err
	}
	p := &layerPlan{written: written, below: &r.from}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.detached != nil {
		p.based = r.detached.without(written)
	}
	return p, nil
}

// mark says what becomes of pages.
type mark struct {
	page, pages uint64
	verdict     verdict
}

// verdict is what becomes of a page of a layer.
type verdict int

const (
	elide verdict = iota // as below
	zero
	store
	asBase
)

// layerJob is one layer being written.
type layerJob struct {
	*layerPlan
	from source
	f    *os.File
	pace *pace
}

// write writes the layer. The file is complete, but not yet durable.
func (j *layerJob) write(id snapshot.ID, base snapshot.Digest) (saved Saved, err error) {
	marks, err := j.look()
	if err != nil {
		return saved, err
	}
	b := snapshot.NewLayerBuilder(snapshot.LayerInfo{ID: id, MemoryBytes: j.below.size, Base: base, Parent: j.below.name})
	kinds := map[verdict]snapshot.RunKind{zero: snapshot.RunZero, store: snapshot.RunData, asBase: snapshot.RunBase}
	for _, m := range marks {
		if m.verdict == elide {
			saved.ElidedPages += m.pages
			continue
		}
		if err := b.Add(kinds[m.verdict], m.page, m.pages); err != nil {
			return saved, err
		}
	}
	if err := j.writeData(b); err != nil {
		return saved, err
	}
	info, err := b.Finish(j.f)
	saved.DataPages, saved.ZeroPages, saved.BasePages = info.DataPages, info.ZeroPages, info.BasePages
	saved.Memory, saved.Parent = info.Digest, info.Parent
	return saved, err
}

// unit is pages that are looked at together.
type unit struct {
	pageRange
	based bool
}

// unitsPerTurn is how many units a worker takes at a time.
const unitsPerTurn = 64

// look compares all pages that may have changed with what is below. The marks ascend.
func (j *layerJob) look() ([]mark, error) {
	var units []unit
	_ = j.written.runs(chunkPages, func(first, n uint64) error {
		units = append(units, unit{pageRange{first, n}, false})
		return nil
	})
	if j.based != nil {
		_ = j.based.runs(chunkPages, func(first, n uint64) error {
			units = append(units, unit{pageRange{first, n}, true})
			return nil
		})
		slices.SortFunc(units, func(a, b unit) int { return cmp.Compare(a.first, b.first) })
	}
	turns := slices.Collect(slices.Chunk(units, unitsPerTurn))
	found := make([][]mark, len(turns))
	err := parallel(len(turns), func() func(int) error {
		buf := make([]byte, snapshot.ChunkBytes)
		return func(i int) (err error) {
			found[i], err = j.lookAt(turns[i], buf)
			return err
		}
	})
	return slices.Concat(found...), err
}

func (j *layerJob) lookAt(units []unit, buf []byte) (out []mark, err error) {
	add := func(page, pages uint64, v verdict) {
		if n := len(out); n > 0 && out[n-1].verdict == v && out[n-1].page+out[n-1].pages == page {
			out[n-1].pages += pages
			return
		}
		out = append(out, mark{page, pages, v})
	}
	for len(units) > 0 {
		if u := units[0]; u.based {
			add(u.first, u.n, asBase)
			units = units[1:]
			continue
		}
		var batch []pageRange
		for pages := uint64(0); len(units) > 0 && !units[0].based && pages+units[0].n <= chunkPages; units = units[1:] {
			batch, pages = append(batch, units[0].pageRange), pages+units[0].n
		}
		err = j.from.read(batch, func(b [][]byte) error {
			for i, run := range batch {
				if err := guarded(b[i], func() error { return j.compare(run.first, b[i], buf, add) }); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

// compare judges the pages from first on, whose contents are now, and calls add for each.
func (j *layerJob) compare(first uint64, now, buf []byte, add func(page, pages uint64, v verdict)) error {
	n := uint64(len(now)) / snapshot.PageSize
	return j.below.each(first, n, func(page, n uint64, file *os.File, off uint64) error {
		size := n * snapshot.PageSize
		var was []byte
		if file != nil && !j.below.isHole(file, off, size) {
			was = buf[:size]
			if got, err := file.ReadAt(was, int64(off)); got < len(was) {
				return fmt.Errorf("read what memory was restored from: %w", err)
			}
		}
		is := now[(page-first)*snapshot.PageSize:][:size]
		for at := uint64(0); at < size; at += snapshot.PageSize {
			v, p := store, is[at:at+snapshot.PageSize]
			if was == nil && isZero(p) || was != nil && bytes.Equal(p, was[at:at+snapshot.PageSize]) {
				v = elide
			} else if was != nil && isZero(p) {
				v = zero
			}
			add(page+at/snapshot.PageSize, 1, v)
		}
		return nil
	})
}

// parallel has saveWorkers goroutines do n jobs. Each calls the function worker returns, with one job after another. It returns
// the first error, after all have ended.
func parallel(n int, worker func() func(job int) error) error {
	var (
		next   atomic.Int64
		failed atomic.Bool
		first  error
		once   sync.Once
		all    sync.WaitGroup
	)
	for range min(n, saveWorkers) {
		all.Go(func() {
			do := worker()
			for job := int(next.Add(1)) - 1; job < n && !failed.Load(); job = int(next.Add(1)) - 1 {
				if err := do(job); err != nil {
					once.Do(func() { first = err })
					failed.Store(true)
				}
			}
		})
	}
	all.Wait()
	return first
}
