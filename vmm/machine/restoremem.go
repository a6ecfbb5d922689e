package machine

import (
	"fmt"
	"os"

	"torpor/vmm/snapshot"
)

const (
	// mapBytes is the shortest run of a diff that is mapped; below it a read is cheaper than a mapping and two splits of the one
	// around it.
	mapBytes = 64 << 10
	// maxMappings keeps the process well below vm.max_map_count (65,530 unless changed), at two mappings for each run.
	maxMappings = 8000
)

// applyDiff lays a diff over the base: long runs are mapped from its file, short ones copied in and verified. The file may be
// closed afterwards.
func (r *ram) applyDiff(f *os.File, state *snapshot.State) error {
	d, err := snapshot.OpenDiff(f)
	if err != nil {
		return err
	}
	if err := state.Owns(d.Info); err != nil {
		return err
	}
	if d.Info.MemoryBytes != r.mem.Size() {
		return &snapshot.Error{Part: "diff header", Err: fmt.Errorf("%w: memory is %d bytes", snapshot.ErrMismatch, r.mem.Size())}
	}
	spans := r.spans(d.Runs)
	least := mapThreshold(spans)
	for _, s := range spans {
		if s.bytes() < least {
			if err := r.copySpan(d, s); err != nil {
				return err
			}
			continue
		}
		if err := r.mapSpan(f, s); err != nil {
			return fmt.Errorf("map memory diff: %w", err)
		}
		r.inherited = append(r.inherited, pageRange{s.page, s.pages})
	}
	return nil
}

// span is a sequence of runs of one kind that are adjacent in memory and in the file, within one region of memory.
type span struct {
	page, pages uint64
	kind        snapshot.RunKind
	offset      uint64 // in the file; meaningless for zero pages
	runs        []snapshot.Run
}

func (s span) bytes() uint64 { return s.pages * snapshot.PageSize }

// spans joins runs. Neither writer nor reader of a diff knows of regions, so a run across the hole is cut here.
func (r *ram) spans(runs []snapshot.Run) []span {
	var out []span
	for i, run := range runs {
		if n := len(out); n > 0 {
			last := &out[n-1]
			adjacent := last.kind == run.Kind && last.page+last.pages == run.Page
			inFile := run.Kind == snapshot.RunZero || last.offset+last.bytes() == run.Offset
			if adjacent && inFile && !r.isRegionStart(run.Page) {
				last.pages += uint64(run.Pages)
				last.runs = runs[i-len(last.runs) : i+1]
				continue
			}
		}
		out = append(out, span{page: run.Page, pages: uint64(run.Pages), kind: run.Kind, offset: run.Offset, runs: runs[i : i+1]})
	}
	return out
}

func (r *ram) isRegionStart(page uint64) bool {
	first := uint64(0)
	for _, region := range r.mem.Regions() {
		if page == first {
			return true
		}
		first += uint64(len(region.Bytes)) / snapshot.PageSize
	}
	return false
}

// mapThreshold is the length from which spans are mapped, raised until there are not too many of them.
func mapThreshold(spans []span) uint64 {
	for least := uint64(mapBytes); ; least *= 2 {
		n := 0
		for _, s := range spans {
			if s.bytes() >= least {
				n++
			}
		}
		if n <= maxMappings {
			return least
		}
	}
}

// copySpan reads the runs of a span into memory, or clears it.
func (r *ram) copySpan(d *snapshot.DiffReader, s span) error {
	for _, run := range s.runs {
		b := r.slice(run.Page, uint64(run.Pages))
		if len(b) != run.Bytes() {
			return &snapshot.Error{Part: "diff, table of runs", Err: fmt.Errorf("%w: a run crosses the hole", snapshot.ErrFormat)}
		}
		err := guarded(b, func() error {
			if run.Kind == snapshot.RunZero {
				clear(b)
				return nil
			}
			return d.ReadRun(run, b)
		})
		if err != nil {
			return err
		}
	}
	return nil
}
