package machine

import (
	"fmt"
	"os"

	"torpor/vmm/snapshot"
)

const (
	// mapBytes is the shortest run of a layer that is mapped; below it a read is cheaper than a mapping and two splits of the one
	// around it.
	mapBytes = 64 << 10
	// maxMappings keeps the process well below vm.max_map_count (65,530 unless changed), at two mappings for each run.
	maxMappings = 8000
	// maxLayers is how many layers a machine is restored from at most.
	maxLayers = 32
)

// applyLayers lays the layers of a snapshot, oldest first, over the base: long runs are mapped from their files, to be verified
// when there is time (verifier), short ones copied in and verified. The files are the memory's unless there is an error.
func (r *ram) applyLayers(files []*os.File, state *snapshot.State) error {
	layers := make([]*snapshot.Layer, len(files))
	for i, f := range files {
		var err error
		if layers[i], err = snapshot.OpenLayer(f, snapshot.LayerLabel(i)); err != nil {
			return err
		}
	}
	if err := state.Owns(layers); err != nil {
		return err
	}
	r.baseDigest = state.Base()
	r.from.name = r.baseDigest
	if len(layers) == 0 {
		return nil
	}
	newest := layers[len(layers)-1]
	if newest.Info.MemoryBytes != r.mem.Size() {
		return &snapshot.Error{Part: "state", Err: fmt.Errorf("%w: memory is %d bytes", snapshot.ErrMismatch, r.mem.Size())}
	}
	if err := r.applyPieces(files, layers); err != nil {
		return err
	}
	r.from.layers, r.from.name = files, newest.Info.Name()
	return nil
}

func (r *ram) applyPieces(files []*os.File, layers []*snapshot.Layer) error {
	spans := r.spans(layers, snapshot.Overlay(layers))
	least := mapThreshold(spans)
	reader, mapped := snapshot.NewPieceReader(layers), newUnverified(layers)
	for _, s := range spans {
		if s.bytes() < least {
			if err := r.copySpan(reader, s); err != nil {
				return err
			}
			r.detach(pageRange{s.page, s.pages})
			continue
		}
		var f *os.File
		if s.kind == snapshot.RunData {
			f = files[s.layer]
			mapped.add(s)
		}
		if err := r.mapSpan(f, s); err != nil {
			return fmt.Errorf("map memory layer: %w", err)
		}
		r.inherited = append(r.inherited, pageRange{s.page, s.pages})
	}
	r.mapped = mapped
	return nil
}

// span is a sequence of pieces of one kind that are adjacent in memory and in one file, within one region of memory.
type span struct {
	page, pages uint64
	kind        snapshot.RunKind
	layer       int
	offset      uint64 // in the file; meaningless for zero pages
	pieces      []snapshot.Piece
}

func (s span) bytes() uint64 { return s.pages * snapshot.PageSize }

// spans joins pieces, and notes them in the lineage. Those that are as in the base are left out: it is mapped already. Neither
// writer nor reader of a layer knows of regions; that no run crosses the border between them is checked here.
func (r *ram) spans(layers []*snapshot.Layer, pieces []snapshot.Piece) []span {
	var out []span
	for i, p := range pieces {
		if p.Kind == snapshot.RunBase {
			continue
		}
		r.from.addPiece(p, layers)
		next := span{page: p.Page, pages: p.Pages, kind: p.Kind, pieces: pieces[i : i+1]}
		if p.Kind == snapshot.RunData {
			next.layer, next.offset = p.Layer, p.Offset(layers)
		}
		if n := len(out); n > 0 {
			last := &out[n-1]
			adjacent := last.kind == p.Kind && last.page+last.pages == p.Page && last.layer == next.layer
			inFile := p.Kind == snapshot.RunZero || last.offset+last.bytes() == next.offset
			if adjacent && inFile && !r.isRegionStart(p.Page) {
				last.pages += p.Pages
				last.pieces = pieces[i-len(last.pieces) : i+1]
				continue
			}
		}
		out = append(out, next)
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

// errCrossesHole is about a run that begins in one region of memory and ends in the next.
func errCrossesHole(page uint64) error {
	return &snapshot.Error{Part: "memory layers, table of runs", Err: fmt.Errorf("%w: the run at page %d crosses the hole", snapshot.ErrFormat, page)}
}

// copySpan reads the pieces of a span into memory, or clears it.
func (r *ram) copySpan(reader *snapshot.PieceReader, s span) error {
	for _, p := range s.pieces {
		b := r.slice(p.Page, p.Pages)
		if uint64(len(b)) != p.Pages*snapshot.PageSize {
			return errCrossesHole(p.Page)
		}
		err := guarded(b, func() error {
			if p.Kind == snapshot.RunZero {
				clear(b)
				return nil
			}
			return reader.Read(p, b)
		})
		if err != nil {
			return err
		}
	}
	return nil
}
