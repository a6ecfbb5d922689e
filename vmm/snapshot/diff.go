package snapshot

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
)

// DiffInfo is the header of a diff file.
type DiffInfo struct {
	ID          ID
	MemoryBytes uint64 // size of the guest's memory
	Digest      Digest // names the file
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
		r.appendTo(&table)
	}
	header := diffHeader{
		version: DiffVersion, runs: uint32(len(w.runs)), memoryBytes: w.info.MemoryBytes, tableOff: w.off, id: w.info.ID,
		tableSum: Checksum(table),
	}
	if len(table) > 0 {
		if _, err := w.w.WriteAt(table, int64(w.off)); err != nil {
			return w.info, fmt.Errorf("write diff: %w", err)
		}
	}
	raw := header.encode()
	if _, err := w.w.WriteAt(raw, 0); err != nil {
		return w.info, fmt.Errorf("write diff: %w", err)
	}
	w.info.Digest = sha256.Sum256(append(raw, table...))
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
	raw := make([]byte, diffHeaderBytes)
	if n, err := r.ReadAt(raw, 0); n < len(raw) {
		return nil, badOrIO("diff header", err)
	}
	h, err := decodeDiffHeader(raw)
	if err != nil {
		return nil, err
	}
	d := &DiffReader{Info: DiffInfo{ID: h.id, MemoryBytes: h.memoryBytes}, r: r}
	if err := d.readTable(raw, h); err != nil {
		return nil, err
	}
	return d, nil
}

// tableStep is how much of the run table is read at once, so that a lie about its length cannot make us allocate it.
const tableStep = 1 << 20

func (d *DiffReader) readTable(header []byte, h diffHeader) error {
	const part = "diff, table of runs"
	var table []byte
	off := h.tableOff
	for left := uint64(h.runs) * runBytes; left > 0; {
		n := min(left, tableStep)
		step := make([]byte, n)
		if got, err := d.r.ReadAt(step, int64(off)); got < len(step) {
			return badOrIO(part, err)
		}
		table, off, left = append(table, step...), off+n, left-n
	}
	if Checksum(table) != h.tableSum {
		return bad(part, ErrChecksum)
	}
	d.Info.Digest = sha256.Sum256(append(header, table...))
	page, data := uint64(0), uint64(dataStart)
	for dec := (&decoder{b: table}); len(dec.b) > 0; {
		r, err := decodeRun(dec, page, data, h.memoryBytes/PageSize)
		if err != nil {
			return err
		}
		if r.Kind == RunData {
			data += uint64(r.Bytes())
			d.Info.DataPages += uint64(r.Pages)
		} else {
			d.Info.ZeroPages += uint64(r.Pages)
		}
		page = r.End()
		d.Runs = append(d.Runs, r)
	}
	if data != h.tableOff {
		return badf(part, "the data ends at %d, the table begins at %d", data, h.tableOff)
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
