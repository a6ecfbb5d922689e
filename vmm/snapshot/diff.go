package snapshot

import (
	"errors"
	"fmt"
	"io"
)

// DiffVersion is the version of the diff format this package writes, and the only one it reads so far.
const DiffVersion = 1

const (
	diffMagic       = "TORPORDF"
	diffHeaderBytes = 64
	runBytes        = 32
	// dataStart is where page data begins: the header has a page of its own, so that data can be mapped.
	dataStart = PageSize
)

// RunKind says what a run holds.
type RunKind uint32

// The kinds of run.
const (
	RunData RunKind = 1 // the file has the pages
	RunZero RunKind = 2 // the pages are zero, where the base is not
)

// Run is a sequence of guest pages, at most ChunkBytes of data long. Page numbers count the flat image: the hole below 4 GiB
// is not in it.
type Run struct {
	Page   uint64
	Pages  uint32
	Kind   RunKind
	Offset uint64 // in the file, page-aligned; 0 for RunZero
	Sum    uint32 // CRC-32C of the data; 0 for RunZero
}

// End is the page after the run.
func (r Run) End() uint64 { return r.Page + uint64(r.Pages) }

// Bytes is the length of the run's data.
func (r Run) Bytes() int { return int(r.Pages) * PageSize }

func (r Run) part() string { return fmt.Sprintf("diff, pages %d-%d", r.Page, r.End()-1) }

// DiffInfo is the header of a diff file.
type DiffInfo struct {
	ID          ID
	MemoryBytes uint64 // size of the guest's memory
	DataPages   uint64
	ZeroPages   uint64
}

// DiffWriter writes a diff file front to back: pages in ascending order, then the table of runs, then the header.
type DiffWriter struct {
	w     io.WriterAt
	info  DiffInfo
	runs  []Run
	off   uint64 // where the next page goes
	stage []byte // the newest pages, not yet written
}

// stageBytes is how much is written at once: short runs do not become short writes.
const stageBytes = 1 << 20

// NewDiffWriter starts a diff in an empty file.
func NewDiffWriter(w io.WriterAt, id ID, memoryBytes uint64) *DiffWriter {
	return &DiffWriter{
		w: w, info: DiffInfo{ID: id, MemoryBytes: memoryBytes}, off: dataStart, stage: make([]byte, 0, stageBytes),
	}
}

// Data writes whole pages that begin at the given page. Pages come in ascending order, once each.
func (w *DiffWriter) Data(page uint64, b []byte) error {
	if err := w.check(page, uint64(len(b)/PageSize), len(b)%PageSize == 0); err != nil {
		return err
	}
	for len(b) > 0 {
		n := min(len(b), ChunkBytes)
		w.runs = append(w.runs, Run{Page: page, Pages: uint32(n / PageSize), Kind: RunData, Offset: w.off, Sum: Checksum(b[:n])})
		if err := w.append(b[:n]); err != nil {
			return err
		}
		page, b = page+uint64(n/PageSize), b[n:]
		w.info.DataPages += uint64(n / PageSize)
	}
	return nil
}

func (w *DiffWriter) append(b []byte) error {
	w.off += uint64(len(b))
	for len(b) > 0 {
		n := min(len(b), cap(w.stage)-len(w.stage))
		w.stage, b = append(w.stage, b[:n]...), b[n:]
		if len(w.stage) == cap(w.stage) {
			if err := w.flush(b); err != nil {
				return err
			}
		}
	}
	return nil
}

// flush writes the stage, whose last byte lies before the given rest, which is still to come.
func (w *DiffWriter) flush(rest []byte) error {
	at := w.off - uint64(len(rest)) - uint64(len(w.stage))
	if _, err := w.w.WriteAt(w.stage, int64(at)); err != nil {
		return fmt.Errorf("write diff: %w", err)
	}
	w.stage = w.stage[:0]
	return nil
}

// Zero records pages that are zero, at most ChunkBytes of them.
func (w *DiffWriter) Zero(page, pages uint64) error {
	if err := w.check(page, pages, pages <= chunkPages); err != nil {
		return err
	}
	w.info.ZeroPages += pages
	w.runs = append(w.runs, Run{Page: page, Pages: uint32(pages), Kind: RunZero})
	return nil
}

func (w *DiffWriter) check(page, pages uint64, sized bool) error {
	next := uint64(0)
	if n := len(w.runs); n > 0 {
		next = w.runs[n-1].End()
	}
	if !sized || pages == 0 || page < next || page+pages > w.info.MemoryBytes/PageSize {
		return fmt.Errorf("write diff: pages %d+%d are out of order or not in memory", page, pages)
	}
	return nil
}

// Finish writes the table and the header. The file is complete, but not yet durable.
func (w *DiffWriter) Finish() (DiffInfo, error) {
	if err := w.flush(nil); err != nil {
		return w.info, err
	}
	var table encoder
	for _, r := range w.runs {
		table.u64(r.Page)
		table.u64(r.Offset)
		table.u32(r.Pages)
		table.u32(uint32(r.Kind))
		table.u32(r.Sum)
		table.u32(0)
	}
	header := encoder(diffMagic)
	header.u32(DiffVersion)
	header.u32(uint32(len(w.runs)))
	header.u64(w.info.MemoryBytes)
	header.u64(w.off)
	header = append(header, w.info.ID[:]...)
	header.u32(Checksum(table))
	header = append(header, make([]byte, diffHeaderBytes-4-len(header))...)
	header.u32(Checksum(header))
	if len(table) > 0 {
		if _, err := w.w.WriteAt(table, int64(w.off)); err != nil {
			return w.info, fmt.Errorf("write diff: %w", err)
		}
	}
	if _, err := w.w.WriteAt(header, 0); err != nil {
		return w.info, fmt.Errorf("write diff: %w", err)
	}
	return w.info, nil
}

// DiffReader reads a diff file. Its methods are safe for concurrent use.
type DiffReader struct {
	Info DiffInfo
	Runs []Run // ascending, disjoint
	r    io.ReaderAt
}

// OpenDiff reads and verifies the header and the table of runs; the pages themselves are verified as they are read.
func OpenDiff(r io.ReaderAt) (*DiffReader, error) {
	const part = "diff header"
	h := make([]byte, diffHeaderBytes)
	if n, err := r.ReadAt(h, 0); n < len(h) {
		return nil, badOrIO(part, err)
	}
	if string(h[:8]) != diffMagic {
		return nil, badf(part, "this is not a diff file")
	}
	if v := le.Uint32(h[8:]); v != DiffVersion {
		return nil, bad(part, fmt.Errorf("%w %d (this Torpor reads version %d)", ErrVersion, v, DiffVersion))
	}
	if Checksum(h[:60]) != le.Uint32(h[60:]) {
		return nil, bad(part, ErrChecksum)
	}
	runs, memory, tableOff := uint64(le.Uint32(h[12:])), le.Uint64(h[16:]), le.Uint64(h[24:])
	if memory%PageSize != 0 || runs > memory/PageSize || tableOff%PageSize != 0 || tableOff < dataStart || tableOff-dataStart > memory {
		return nil, badf(part, "%d runs of %d bytes of memory, table at %d", runs, memory, tableOff)
	}
	d := &DiffReader{Info: DiffInfo{ID: ID(h[32:48]), MemoryBytes: memory}, r: r}
	return d, d.readTable(runs, tableOff, le.Uint32(h[48:]))
}

// tableStep is how much of the run table is read at once, so that a lie about its length cannot make us allocate it.
const tableStep = 1 << 20

func (d *DiffReader) readTable(runs, off uint64, sum uint32) error {
	const part = "diff, table of runs"
	var table []byte
	for left := runs * runBytes; left > 0; {
		n := min(left, tableStep)
		step := make([]byte, n)
		if got, err := d.r.ReadAt(step, int64(off)); got < len(step) {
			return badOrIO(part, err)
		}
		table, off, left = append(table, step...), off+n, left-n
	}
	if Checksum(table) != sum {
		return bad(part, ErrChecksum)
	}
	page, data := uint64(0), uint64(dataStart)
	for dec := (&decoder{b: table}); len(dec.b) > 0; {
		r := Run{Page: dec.u64(), Offset: dec.u64(), Pages: dec.u32(), Kind: RunKind(dec.u32()), Sum: dec.u32()}
		zero := dec.u32()
		if r.Pages == 0 || zero != 0 || r.Page < page || r.Page > d.Info.MemoryBytes/PageSize || r.End() > d.Info.MemoryBytes/PageSize {
			return badf(part, "run of %d pages at %d", r.Pages, r.Page)
		}
		switch {
		case r.Kind == RunData && r.Pages <= chunkPages && r.Offset == data:
			data += uint64(r.Bytes())
			d.Info.DataPages += uint64(r.Pages)
		case r.Kind == RunZero && r.Pages <= chunkPages && r.Offset == 0 && r.Sum == 0:
			d.Info.ZeroPages += uint64(r.Pages)
		default:
			return badf(part, "run of kind %d at %d", r.Kind, r.Page)
		}
		page = r.End()
		d.Runs = append(d.Runs, r)
	}
	return nil
}

// ReadRun fills b, of r.Bytes() bytes, with the data of a run and verifies it.
func (d *DiffReader) ReadRun(r Run, b []byte) error {
	if n, err := d.r.ReadAt(b, int64(r.Offset)); n < len(b) {
		return badOrIO(r.part(), err)
	}
	if Checksum(b) != r.Sum {
		return bad(r.part(), ErrChecksum)
	}
	return nil
}

// Verify reads all data and checks it.
func (d *DiffReader) Verify() error {
	buf := make([]byte, ChunkBytes)
	for _, r := range d.Runs {
		if r.Kind != RunData {
			continue
		}
		if err := d.ReadRun(r, buf[:r.Bytes()]); err != nil {
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
