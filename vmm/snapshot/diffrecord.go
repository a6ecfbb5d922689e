package snapshot

import "fmt"

// DiffVersion is the version of the diff format this package writes, and the only one it reads so far.
const DiffVersion = 1

const (
	diffMagic       = "TORPORDF"
	diffHeaderBytes = 64
	runBytes        = 32
	// dataStart is where page data begins: the header has a page of its own, so that data can be mapped.
	dataStart = PageSize
)

// diffHeader is the first record of a diff file, after the magic.
type diffHeader struct {
	version     uint32 // [8:12)
	runs        uint32 // [12:16) records in the table
	memoryBytes uint64 // [16:24)
	tableOff    uint64 // [24:32) where the table is, after the data
	id          ID     // [32:48)
	tableSum    uint32 // [48:52) CRC of the table
	// [52:60) zero
	// [60:64) CRC of bytes 0-59
}

func (h diffHeader) encode() []byte {
	e := encoder(diffMagic)
	e.u32(h.version)
	e.u32(h.runs)
	e.u64(h.memoryBytes)
	e.u64(h.tableOff)
	e = append(e, h.id[:]...)
	e.u32(h.tableSum)
	e.u64(0)
	e.u32(Checksum(e))
	return e
}

// decodeDiffHeader reads diffHeaderBytes bytes and checks them against each other.
func decodeDiffHeader(b []byte) (h diffHeader, err error) {
	const part = "diff header"
	if string(b[:8]) != diffMagic {
		return h, badf(part, "this is not a diff file")
	}
	d := decoder{b: b[8:]}
	h.version = d.u32()
	if h.version != DiffVersion {
		return h, bad(part, fmt.Errorf("%w %d (this Torpor reads version %d)", ErrVersion, h.version, DiffVersion))
	}
	h.runs, h.memoryBytes, h.tableOff, h.id, h.tableSum = d.u32(), d.u64(), d.u64(), ID(d.take(16)), d.u32()
	zero, sum := d.u64(), d.u32()
	switch {
	case Checksum(b[:60]) != sum:
		return h, bad(part, ErrChecksum)
	case zero != 0:
		return h, badf(part, "bytes 52-59 are not zero")
	case h.memoryBytes%PageSize != 0 || uint64(h.runs) > h.memoryBytes/PageSize ||
		h.tableOff%PageSize != 0 || h.tableOff < dataStart || h.tableOff-dataStart > h.memoryBytes:
		return h, badf(part, "%d runs of %d bytes of memory, table at %d", h.runs, h.memoryBytes, h.tableOff)
	}
	return h, nil
}

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
	Page   uint64  // [0:8)
	Offset uint64  // [8:16) in the file, page-aligned; 0 for RunZero
	Pages  uint32  // [16:20)
	Kind   RunKind // [20:24)
	Sum    uint32  // [24:28) CRC-32C of the data; 0 for RunZero
	// [28:32) zero
}

// End is the page after the run.
func (r Run) End() uint64 { return r.Page + uint64(r.Pages) }

// Bytes is the length of the run's data.
func (r Run) Bytes() int { return int(r.Pages) * PageSize }

func (r Run) part() string { return fmt.Sprintf("diff, pages %d-%d", r.Page, r.End()-1) }

func (r Run) appendTo(e *encoder) {
	e.u64(r.Page)
	e.u64(r.Offset)
	e.u32(r.Pages)
	e.u32(uint32(r.Kind))
	e.u32(r.Sum)
	e.u32(0)
}

// decodeRun reads the next run off d. after is the first page it may have, data where the file's next data is.
func decodeRun(d *decoder, after, data, memoryPages uint64) (Run, error) {
	const part = "diff, table of runs"
	r := Run{Page: d.u64(), Offset: d.u64(), Pages: d.u32(), Kind: RunKind(d.u32()), Sum: d.u32()}
	zero := d.u32()
	if r.Pages == 0 || zero != 0 || r.Page < after || r.Page > memoryPages || r.End() > memoryPages {
		return r, badf(part, "run of %d pages at %d", r.Pages, r.Page)
	}
	isData := r.Kind == RunData && r.Offset == data
	isZero := r.Kind == RunZero && r.Offset == 0 && r.Sum == 0
	if r.Pages > chunkPages || !isData && !isZero {
		return r, badf(part, "run of kind %d at %d", r.Kind, r.Page)
	}
	return r, nil
}
