package snapshot

import "fmt"

// CheckChain reports, as an *Error that names the layer, whether layers, oldest first, lie upon the base and upon one another.
func CheckChain(base Digest, layers []*Layer) error { return checkChain(base, base, layers) }

// checkChain is CheckChain for layers of which the oldest lies upon below.
func checkChain(base, below Digest, layers []*Layer) error {
	what := "what is below"
	for i, l := range layers {
		part := l.label + ", header"
		switch {
		case l.Info.MemoryBytes != layers[0].Info.MemoryBytes:
			return bad(part, fmt.Errorf("%w: it is of %d bytes of memory, %s of %d", ErrMismatch, l.Info.MemoryBytes, layers[0].label, layers[0].Info.MemoryBytes))
		case l.Info.Version == 1 && i > 0:
			return bad(part, fmt.Errorf("%w: a layer of version 1 lies upon the base alone", ErrMismatch))
		case l.Info.Version > 1 && l.Info.Base != base:
			return bad(part, fmt.Errorf("%w: its base is %v, not %v", ErrMismatch, l.Info.Base, base))
		case l.Info.Version > 1 && l.Info.Parent != below:
			return bad(part, fmt.Errorf("%w: it lies upon %v; %s is %v", ErrMismatch, l.Info.Parent, what, below))
		}
		below, what = l.Info.Name(), l.label
	}
	return nil
}

// Piece is a part of a run of one of several layers that nothing newer covers.
type Piece struct {
	Page, Pages uint64
	Kind        RunKind
	Layer, Run  int // Layers[Layer].Runs[Run]
}

// End is the page after the piece.
func (p Piece) End() uint64 { return p.Page + p.Pages }

// Overlay is what layers, oldest first, hold together: the newest run wins. The pieces ascend.
func Overlay(layers []*Layer) []Piece {
	var out []Piece
	for i, l := range layers {
		out = cover(out, i, l.Runs)
	}
	return out
}

// cover puts the runs of a layer over pieces.
func cover(below []Piece, layer int, runs []Run) []Piece {
	out := make([]Piece, 0, len(below)+len(runs))
	for i, r := range runs {
		below = appendBelow(&out, below, r.Page)
		out = append(out, Piece{Page: r.Page, Pages: uint64(r.Pages), Kind: r.Kind, Layer: layer, Run: i})
		for len(below) > 0 && below[0].End() <= r.End() {
			below = below[1:]
		}
		if len(below) > 0 && below[0].Page < r.End() {
			below[0].Pages, below[0].Page = below[0].End()-r.End(), r.End()
		}
	}
	return append(out, below...)
}

// appendBelow moves to out what of below lies before page, and returns the rest.
func appendBelow(out *[]Piece, below []Piece, page uint64) []Piece {
	for len(below) > 0 && below[0].Page < page {
		p := below[0]
		if p.End() <= page {
			*out, below = append(*out, p), below[1:]
			continue
		}
		below[0].Pages, below[0].Page = p.End()-page, page
		p.Pages = page - p.Page
		*out = append(*out, p)
	}
	return below
}

// offsetOf is where in the file the data of a page of the run is.
func (r Run) offsetOf(page uint64) uint64 { return r.Offset + (page-r.Page)*PageSize }

// Offset is where the data of a piece begins in the file of its layer.
func (p Piece) Offset(layers []*Layer) uint64 { return layers[p.Layer].Runs[p.Run].offsetOf(p.Page) }

// PieceReader reads pieces and verifies the runs they are parts of. It reads each run once if the pieces ascend. It is not safe
// for concurrent use.
type PieceReader struct {
	layers []*Layer
	cached []cachedRun // for each layer, the run that was read last
}

type cachedRun struct {
	run  int // 1 + its index: 0 is none
	data []byte
}

// NewPieceReader returns a reader of the pieces of these layers.
func NewPieceReader(layers []*Layer) *PieceReader {
	return &PieceReader{layers: layers, cached: make([]cachedRun, len(layers))}
}

// Read fills b with the data of a piece.
func (r *PieceReader) Read(p Piece, b []byte) error {
	l, have := r.layers[p.Layer], &r.cached[p.Layer]
	run := l.Runs[p.Run]
	if p.Pages == uint64(run.Pages) {
		return l.ReadRun(run, b)
	}
	if have.run != p.Run+1 {
		if have.data == nil {
			have.data = make([]byte, ChunkBytes)
		}
		have.run = 0
		if err := l.ReadRun(run, have.data[:run.Bytes()]); err != nil {
			return err
		}
		have.run = p.Run + 1
	}
	copy(b, have.data[(p.Page-run.Page)*PageSize:])
	return nil
}
