package machine

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"

	"golang.org/x/sys/unix"

	"torpor/vmm/snapshot"
)

// recorder remembers which recording saw a page first: 0 for none yet, n for the n-th.
type recorder struct {
	first []uint8
	count uint8
}

// WorkingSet writes which pages the machine has touched since it was made to f: those that are mapped in this process. With a page
// that was read these are also its neighbours in the page cache, since the kernel maps up to 16 at once: who wants to know exactly
// begins with memory that is not in the page cache, and restores with Recording. Pages of earlier calls come first. f is closed.
func (m *Machine) WorkingSet(f *os.File) (all, written uint64, err error) {
	defer closeFiles(f)
	m.mu.Lock()
	defer m.mu.Unlock()
	if State(m.state.Load()) == Ended {
		return 0, 0, ErrEnded
	}
	w, err := m.recorder.record(m.ram, m.host.pagemap)
	if err != nil {
		return 0, 0, err
	}
	if _, err := f.WriteAt(w.Encode(), 0); err != nil {
		return 0, 0, fmt.Errorf("write the working set: %w", err)
	}
	all, written = w.Pages()
	return all, written, nil
}

// record looks what is mapped now. A page that is not any more is left out.
func (r *recorder) record(mem *ram, pagemap *os.File) (*snapshot.WorkingSet, error) {
	if r.first == nil {
		r.first = make([]uint8, mem.pages())
	}
	if r.count < math.MaxUint8 {
		r.count++
	}
	entries := make([]uint64, mem.pages())
	if err := mem.pagemap(pagemap, entries); err != nil {
		return nil, err
	}
	for page, e := range entries {
		if r.first[page] == 0 && e&(pagemapPresent|pagemapSwapped) != 0 {
			r.first[page] = r.count
		}
	}
	w := &snapshot.WorkingSet{MemoryBytes: mem.mem.Size()}
	for stage := range r.count {
		w.Runs = r.runs(w.Runs, entries, stage)
	}
	return w, nil
}

// runs appends the runs of one stage.
func (r *recorder) runs(out []snapshot.Touched, entries []uint64, stage uint8) []snapshot.Touched {
	begun := len(out)
	for page, e := range entries {
		if r.first[page] != stage+1 || e&(pagemapPresent|pagemapSwapped) == 0 {
			continue
		}
		written := anonymous(e)
		if n := len(out); n > begun && out[n-1].End() == uint64(page) && out[n-1].Written == written {
			out[n-1].Pages++
			continue
		}
		out = append(out, snapshot.Touched{Page: uint32(page), Pages: 1, Stage: uint16(stage), Written: written})
	}
	return out
}

// readSingly has the kernel read nothing beside a page that is touched.
func (r *ram) readSingly() error {
	for _, region := range r.mem.Regions() {
		if err := unix.Madvise(region.Bytes, unix.MADV_RANDOM); err != nil {
			return fmt.Errorf("record what is touched: %w", os.NewSyscallError("madvise", err))
		}
	}
	return nil
}

// pagemap reads the entries of all pages of the flat image.
func (r *ram) pagemap(pagemap *os.File, entries []uint64) error {
	buf := make([]byte, pagemapStep*pagemapEntry)
	for i, region := range r.mem.Regions() {
		at := int64(r.mem.HostAddr(i)) / snapshot.PageSize * pagemapEntry
		for left := len(region.Bytes) / snapshot.PageSize; left > 0; {
			b := buf[:min(left, pagemapStep)*pagemapEntry]
			if n, err := pagemap.ReadAt(b, at); n < len(b) {
				return fmt.Errorf("find touched pages: %w", err)
			}
			for off := 0; off < len(b); off += pagemapEntry {
				entries[0], entries = binary.LittleEndian.Uint64(b[off:]), entries[1:]
			}
			at += int64(len(b))
			left -= len(b) / pagemapEntry
		}
	}
	return nil
}
