package machine

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"
	"golang.org/x/sys/unix"

	"torpor/vmm/snapshot"
)

// readGap is how many pages that nobody asked for are read when that joins two reads: about what a request costs a fast disk.
const readGap = 4

// prefetch brings the pages of a working set from the disk into the page cache, in large reads that are all under way before the
// first page is needed. A page that the recorded machine wrote until its first recording is also copied ahead, for the guest would
// stop for it twice, to read and to write; those of later recordings are not, so that a machine takes no memory before it has
// work. To map what is only read is not worth it: the kernel maps 16 pages at once when the guest stops for one.
type prefetch struct {
	stop atomic.Bool
	done chan struct{}
}

// startPrefetch begins in the background. file, closed when it was read, may be damaged or another memory's: then it is ignored.
func startPrefetch(mem *ram, file *os.File, log zerolog.Logger) *prefetch {
	begun := time.Now()
	p := &prefetch{done: make(chan struct{})}
	go func() {
		defer close(p.done)
		w, err := snapshot.ReadWorkingSet(file)
		closeFiles(file)
		if err == nil && w.MemoryBytes != mem.mem.Size() {
			err = fmt.Errorf("it is of a memory of %d bytes", w.MemoryBytes)
		}
		if err == nil {
			err = p.run(mem, w)
		}
		if err == nil {
			pages, written := w.Pages()
			log.Info().Uint64("pages", pages).Uint64("written", written).Dur("took", time.Since(begun)).Msg("the working set is in")
		}
		if err != nil {
			log.Warn().Err(err).Msg("the working set is of no use")
		}
	}()
	return p
}

// end stops it and returns when it has let go of the memory. A nil prefetch has ended.
func (p *prefetch) end() {
	if p == nil {
		return
	}
	p.stop.Store(true)
	<-p.done
}

func (p *prefetch) run(mem *ram, w *snapshot.WorkingSet) error {
	for _, r := range reads(w.Runs) {
		if err := p.advise(mem, r, unix.MADV_WILLNEED); err != nil {
			return err
		}
	}
	for _, r := range w.Runs {
		if r.Stage > 0 {
			break
		}
		if !r.Written {
			continue
		}
		if err := p.advise(mem, pageRange{uint64(r.Page), uint64(r.Pages)}, unix.MADV_POPULATE_WRITE); err != nil {
			return err
		}
	}
	return nil
}

// advise gives advice about pages, region by region, unless it is time to stop.
func (p *prefetch) advise(mem *ram, r pageRange, advice int) error {
	for r.n > 0 && !p.stop.Load() {
		b := mem.slice(r.first, r.n)
		// EBADF: memory without a file, and a kernel without swap: there is nothing to read.
		if err := unix.Madvise(b, advice); err != nil && !errors.Is(err, unix.EBADF) {
			return fmt.Errorf("bring in pages %d-%d: %w", r.first, r.first+r.n-1, os.NewSyscallError("madvise", err))
		}
		done := uint64(len(b)) / snapshot.PageSize
		r.first, r.n = r.first+done, r.n-done
	}
	return nil
}

// reads are the large reads that cover the runs, in their order.
func reads(runs []snapshot.Touched) []pageRange {
	var out []pageRange
	stage := uint16(0)
	for _, r := range runs {
		first := uint64(r.Page)
		if n := len(out); n > 0 && r.Stage == stage {
			last := &out[n-1]
			if end := last.first + last.n; first >= end && first-end <= readGap {
				last.n = r.End() - last.first
				continue
			}
		}
		out, stage = append(out, pageRange{first, uint64(r.Pages)}), r.Stage
	}
	return out
}
