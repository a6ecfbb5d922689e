package snapshot

import (
	"fmt"
	"io"
	"os"
)

const (
	workingSetMagic   = "TORPORWS"
	workingSetVersion = 1
	workingSetHeader  = 32
	workingSetRun     = 12
	// maxWorkingSetRuns bounds the file, and what a reader believes: 3 MiB. Pages beyond it, the least wanted, are left out.
	maxWorkingSetRuns = 256 << 10
	maxMemoryPages    = 16 << 30 / PageSize
)

const workingSetPart = "working set"

// WorkingSet is which pages a machine touched, the most wanted first. It is advice: a machine works the same without.
type WorkingSet struct {
	MemoryBytes uint64 // size of the guest's memory
	Runs        []Touched
}

// Touched is a run of pages of the flat image.
type Touched struct {
	Page, Pages uint32
	Stage       uint16 // of the recording that saw it first, from 0; ascending in a WorkingSet
	Written     bool   // by the machine: a private copy of it was made
}

// End is the page after the last.
func (t Touched) End() uint64 { return uint64(t.Page) + uint64(t.Pages) }

// Pages counts all pages and those of them that were written.
func (w *WorkingSet) Pages() (all, written uint64) {
	for _, r := range w.Runs {
		all += uint64(r.Pages)
		if r.Written {
			written += uint64(r.Pages)
		}
	}
	return all, written
}

// Encode returns the file's bytes.
func (w *WorkingSet) Encode() []byte {
	runs := w.Runs[:min(len(w.Runs), maxWorkingSetRuns)]
	var table encoder
	for _, r := range runs {
		kind := uint32(r.Stage) << 1
		if r.Written {
			kind |= 1
		}
		table.u32(r.Page)
		table.u32(r.Pages)
		table.u32(kind)
	}
	header := encoder(workingSetMagic)
	header.u32(workingSetVersion)
	header.u32(uint32(len(runs)))
	header.u64(w.MemoryBytes)
	header.u32(Checksum(table))
	header.u32(Checksum(header))
	return append(header, table...)
}

// ReadWorkingSet reads a whole file, the offset of which does not matter.
func ReadWorkingSet(f *os.File) (*WorkingSet, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, bad(workingSetPart, err)
	}
	if info.Size() > workingSetHeader+maxWorkingSetRuns*workingSetRun {
		return nil, badf(workingSetPart, "%d bytes", info.Size())
	}
	b := make([]byte, info.Size())
	if _, err := io.ReadFull(io.NewSectionReader(f, 0, info.Size()), b); err != nil {
		return nil, bad(workingSetPart, err)
	}
	return DecodeWorkingSet(b)
}

// DecodeWorkingSet reads what Encode wrote.
func DecodeWorkingSet(b []byte) (*WorkingSet, error) {
	if len(b) < workingSetHeader || string(b[:8]) != workingSetMagic {
		return nil, badf(workingSetPart, "it is none")
	}
	head, table := b[:workingSetHeader], b[workingSetHeader:]
	if Checksum(head[:workingSetHeader-4]) != le.Uint32(head[workingSetHeader-4:]) {
		return nil, bad(workingSetPart, ErrChecksum)
	}
	d := decoder{b: head[8:]}
	if v := d.u32(); v != workingSetVersion {
		return nil, bad(workingSetPart, fmt.Errorf("%w: %d", ErrVersion, v))
	}
	n, w := d.u32(), &WorkingSet{MemoryBytes: d.u64()}
	pages := w.MemoryBytes / PageSize
	if n > maxWorkingSetRuns || uint64(len(table)) != uint64(n)*workingSetRun || w.MemoryBytes%PageSize != 0 || pages > maxMemoryPages {
		return nil, badf(workingSetPart, "%d runs in %d bytes, of a memory of %d", n, len(table), w.MemoryBytes)
	}
	if Checksum(table) != d.u32() {
		return nil, bad(workingSetPart, ErrChecksum)
	}
	w.Runs = make([]Touched, n)
	d = decoder{b: table}
	stage, sum := uint16(0), uint64(0)
	for i := range w.Runs {
		r := Touched{Page: d.u32(), Pages: d.u32()}
		kind := d.u32()
		r.Stage, r.Written = uint16(kind>>1), kind&1 == 1
		sum += uint64(r.Pages)
		if r.Pages == 0 || r.End() > pages || sum > pages || kind>>17 != 0 || r.Stage < stage {
			return nil, badf(workingSetPart, "run %d", i)
		}
		w.Runs[i], stage = r, r.Stage
	}
	return w, nil
}
