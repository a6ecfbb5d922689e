package snapshot

import "fmt"

// LayerVersion is the version of the layer format this package writes. It reads this and version 1.
const LayerVersion = 2

const (
	layerMagic        = "TORPORDF"
	layerHeaderBytes1 = 64 // of version 1
	layerHeaderBytes  = 192
	runBytes          = 32
	// dataStart is where page data begins: the header has a page of its own, so that data can be mapped.
	dataStart = PageSize
)

// layerHeader is the first record of a layer file, after the magic. Version 1 has no digests, and its checksums at other places.
type layerHeader struct {
	version     uint32 // [8:12)
	runs        uint32 // [12:16) records in the table
	memoryBytes uint64 // [16:24)
	tableOff    uint64 // [24:32) where the table is, after the data
	id          ID     // [32:48)
	tableSum    uint32 // [48:52) CRC of the table
	// [52:56) zero
	// [56:60) zero
	// version 1: [60:64) CRC of bytes 0-59; after that, the end
	// [60:64) zero
	base     Digest // [64:96)
	parent   Digest // [96:128)
	replaces Digest // [128:160)
	// [160:188) zero
	// [188:192) CRC of bytes 0-187
}

func (h layerHeader) encode() []byte {
	e := encoder(layerMagic)
	e.u32(h.version)
	e.u32(h.runs)
	e.u64(h.memoryBytes)
	e.u64(h.tableOff)
	e = append(e, h.id[:]...)
	e.u32(h.tableSum)
	e = append(e, make([]byte, 12)...)
	for _, d := range []Digest{h.base, h.parent, h.replaces} {
		e = append(e, d[:]...)
	}
	e = append(e, make([]byte, layerHeaderBytes-4-len(e))...)
	e.u32(Checksum(e))
	return e
}

// headerBytes is how long the header is that begins with b, at least 12 bytes.
func headerBytes(b []byte, part string) (int, error) {
	if string(b[:8]) != layerMagic {
		return 0, badf(part, "this is not a memory layer")
	}
	switch v := le.Uint32(b[8:]); v {
	case 1:
		return layerHeaderBytes1, nil
	case LayerVersion:
		return layerHeaderBytes, nil
	default:
		return 0, bad(part, fmt.Errorf("%w %d (this Torpor reads versions up to %d)", ErrVersion, v, LayerVersion))
	}
}

// decodeLayerHeader reads all headerBytes bytes and checks them against each other.
func decodeLayerHeader(b []byte, part string) (h layerHeader, err error) {
	d := decoder{b: b[8:]}
	h.version = d.u32()
	h.runs, h.memoryBytes, h.tableOff, h.id, h.tableSum = d.u32(), d.u64(), d.u64(), ID(d.take(16)), d.u32()
	zero := !allZero(d.take(8))
	if h.version > 1 {
		zero = !allZero(d.take(4)) || zero
		h.base, h.parent, h.replaces = Digest(d.take(32)), Digest(d.take(32)), Digest(d.take(32))
		zero = !allZero(d.take(28)) || zero
	}
	switch {
	case Checksum(b[:len(b)-4]) != d.u32():
		return h, bad(part, ErrChecksum)
	case zero:
		return h, badf(part, "reserved bytes are not zero")
	case h.version > 1 && (h.base.IsZero() || h.parent.IsZero()):
		return h, badf(part, "it lies upon nothing")
	case h.memoryBytes%PageSize != 0 || uint64(h.runs) > h.memoryBytes/PageSize ||
		h.tableOff%PageSize != 0 || h.tableOff < dataStart || h.tableOff-dataStart > h.memoryBytes:
		return h, badf(part, "%d runs of %d bytes of memory, table at %d", h.runs, h.memoryBytes, h.tableOff)
	}
	return h, nil
}

func allZero(b []byte) bool {
	for _, v := range b {
		if v != 0 {
			return false
		}
	}
	return true
}

// RunKind says what a run holds.
type RunKind uint32

// The kinds of run.
const (
	RunData RunKind = 1 // the file has the pages
	RunZero RunKind = 2 // the pages are zero, where those below are not
	RunBase RunKind = 3 // the pages are as in the base, where a layer below has others; since version 2
)

// Run is a sequence of guest pages, at most ChunkBytes of data long. Page numbers count the flat image: the hole below 4 GiB
// is not in it.
type Run struct {
	Page   uint64  // [0:8)
	Offset uint64  // [8:16) in the file, page-aligned; 0 without data
	Pages  uint32  // [16:20)
	Kind   RunKind // [20:24)
	Sum    uint32  // [24:28) CRC-32C of the data; 0 without
	// [28:32) zero
}

// End is the page after the run.
func (r Run) End() uint64 { return r.Page + uint64(r.Pages) }

// Bytes is the length of the run's data.
func (r Run) Bytes() int { return int(r.Pages) * PageSize }

func (r Run) appendTo(e *encoder) {
	e.u64(r.Page)
	e.u64(r.Offset)
	e.u32(r.Pages)
	e.u32(uint32(r.Kind))
	e.u32(r.Sum)
	e.u32(0)
}

// decodeRun reads the next run off d. after is the first page it may have, data where the file's next data is.
func (h layerHeader) decodeRun(d *decoder, after, data uint64, part string) (Run, error) {
	r := Run{Page: d.u64(), Offset: d.u64(), Pages: d.u32(), Kind: RunKind(d.u32()), Sum: d.u32()}
	zero, memoryPages := d.u32(), h.memoryBytes/PageSize
	if r.Pages == 0 || zero != 0 || r.Page < after || r.Page > memoryPages || r.End() > memoryPages {
		return r, badf(part, "run of %d pages at %d", r.Pages, r.Page)
	}
	isData := r.Kind == RunData && r.Offset == data
	isEmpty := (r.Kind == RunZero || r.Kind == RunBase && h.version > 1) && r.Offset == 0 && r.Sum == 0
	crosses := h.version > 1 && r.Page/chunkPages != (r.End()-1)/chunkPages
	if r.Pages > chunkPages || crosses || !isData && !isEmpty {
		return r, badf(part, "run of kind %d at %d", r.Kind, r.Page)
	}
	return r, nil
}
