package snapshot

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
)

// LayerInfo is the header of a memory layer, and what its table adds up to.
type LayerInfo struct {
	Version     uint32
	ID          ID     // of the snapshot whose memory the chain up to this layer is
	MemoryBytes uint64 // size of the guest's memory
	Base        Digest // of the base below all layers; zero in version 1, which does not say
	Parent      Digest // name of the layer, or digest of the base, right below; zero in version 1: it is the base
	Replaces    Digest // name of the newest of the layers this one was merged from; zero if it was not
	Digest      Digest // of header and table

	DataPages uint64
	ZeroPages uint64
	BasePages uint64
	FileBytes uint64 // length of the file
}

// Name is what the layer above calls this one its parent by. A merged layer goes by the name of the newest of those it replaces:
// the memory up to it is the same.
func (i LayerInfo) Name() Digest {
	if i.Replaces.IsZero() {
		return i.Digest
	}
	return i.Replaces
}

func (i *LayerInfo) count(r Run) {
	switch r.Kind {
	case RunData:
		i.DataPages += uint64(r.Pages)
	case RunZero:
		i.ZeroPages += uint64(r.Pages)
	case RunBase:
		i.BasePages += uint64(r.Pages)
	}
}

// Layer reads a memory layer. Its methods are safe for concurrent use.
type Layer struct {
	Info  LayerInfo
	Runs  []Run // ascending, disjoint
	label string
	r     io.ReaderAt
}

// OpenLayer reads and verifies the header and the table of runs; the pages themselves are verified as they are read. label names
// the layer in errors, such as "memory layer 1".
func OpenLayer(r io.ReaderAt, label string) (*Layer, error) {
	part := label + ", header"
	raw := make([]byte, layerHeaderBytes1)
	if n, err := r.ReadAt(raw, 0); n < len(raw) {
		return nil, badOrIO(part, err)
	}
	n, err := headerBytes(raw, part)
	if err != nil {
		return nil, err
	}
	whole := n
	if n > layerHeaderBytes1 {
		whole = dataStart // all of it counts
	}
	raw = make([]byte, whole)
	if got, err := r.ReadAt(raw, 0); got < whole {
		return nil, badOrIO(part, err)
	}
	if !allZero(raw[n:]) {
		return nil, badf(part, "reserved bytes are not zero")
	}
	raw = raw[:n]
	h, err := decodeLayerHeader(raw, part)
	if err != nil {
		return nil, err
	}
	l := &Layer{label: label, r: r, Info: LayerInfo{
		Version: h.version, ID: h.id, MemoryBytes: h.memoryBytes, Base: h.base, Parent: h.parent, Replaces: h.replaces,
		FileBytes: h.tableOff + uint64(h.runs)*runBytes,
	}}
	return l, l.readTable(raw, h)
}

// tableStep is how much of the run table is read at once, so that a lie about its length cannot make us allocate it.
const tableStep = 1 << 20

func (l *Layer) readTable(header []byte, h layerHeader) error {
	part := l.label + ", table of runs"
	var table []byte
	off := h.tableOff
	for left := uint64(h.runs) * runBytes; left > 0; {
		n := min(left, tableStep)
		step := make([]byte, n)
		if got, err := l.r.ReadAt(step, int64(off)); got < len(step) {
			return badOrIO(part, err)
		}
		table, off, left = append(table, step...), off+n, left-n
	}
	if Checksum(table) != h.tableSum {
		return bad(part, ErrChecksum)
	}
	l.Info.Digest = layerDigest(header, table)
	l.Runs = make([]Run, 0, h.runs)
	page, data := uint64(0), uint64(dataStart)
	for d := (&decoder{b: table}); len(d.b) > 0; {
		r, err := h.decodeRun(d, page, data, part)
		if err != nil {
			return err
		}
		if r.Kind == RunData {
			data += uint64(r.Bytes())
		}
		l.Info.count(r)
		page = r.End()
		l.Runs = append(l.Runs, r)
	}
	if data != h.tableOff {
		return badf(part, "the data ends at %d, the table begins at %d", data, h.tableOff)
	}
	return nil
}

func layerDigest(header, table []byte) Digest {
	sum := sha256.New()
	sum.Write(header)
	sum.Write(table)
	return Digest(sum.Sum(nil))
}

// ReadRun fills b, of r.Bytes() bytes, with the data of a run and verifies it.
func (l *Layer) ReadRun(r Run, b []byte) error {
	if n, err := l.r.ReadAt(b, int64(r.Offset)); n < len(b) {
		return badOrIO(l.part(r), err)
	}
	if Checksum(b) != r.Sum {
		return bad(l.part(r), ErrChecksum)
	}
	return nil
}

func (l *Layer) part(r Run) string { return fmt.Sprintf("%s, pages %d-%d", l.label, r.Page, r.End()-1) }

// Verify reads all data and checks it.
func (l *Layer) Verify() error {
	buf := make([]byte, ChunkBytes)
	for _, r := range l.Runs {
		if r.Kind != RunData {
			continue
		}
		if err := l.ReadRun(r, buf[:r.Bytes()]); err != nil {
			return err
		}
	}
	return nil
}

// badOrIO tells a file that ends too early from one that cannot be read.
func badOrIO(part string, err error) error {
	if err == nil || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return badf(part, "the file is cut short")
	}
	return fmt.Errorf("snapshot: %s: %w", part, err)
}
