package machine

import (
	"context"
	"errors"
	"fmt"

	"torpor/vmm/memview"
	"torpor/vmm/snapshot"
)

// source is where a save reads the guest's memory: as it is, or as it was when a view of it was taken.
type source interface {
	// read calls f with the contents of runs, one page-aligned slice for each; they are chunkPages in all at most, and each lies
	// within a region. f must not keep them, and touches them under guarded only. It may be called more than once at a time if read
	// is.
	read(runs []pageRange, f func(b [][]byte) error) error
}

// read implements source for memory as it is: that of a machine that stands still.
func (r *ram) read(runs []pageRange, f func(b [][]byte) error) error {
	b := make([][]byte, len(runs))
	for i, run := range runs {
		b[i] = r.slice(run.first, run.n)
	}
	return f(b)
}

// viewed is memory as it was when the view was taken.
type viewed struct {
	ram  *ram
	view *memview.View
	stop context.Context // of the checkpoint: what is not read when it ends is not worth reading
}

func (v viewed) read(runs []pageRange, f func(b [][]byte) error) error {
	if err := context.Cause(v.stop); err != nil {
		return err
	}
	pieces := make([]memview.Piece, len(runs))
	for i, run := range runs {
		pieces[i] = memview.Piece{Addr: v.ram.hostAddr(run.first), Len: int(run.n * snapshot.PageSize)}
	}
	err := v.view.Read(pieces, func(b []byte) error {
		parts := make([][]byte, len(runs))
		for i := range runs {
			parts[i], b = b[:pieces[i].Len:pieces[i].Len], b[pieces[i].Len:]
		}
		return f(parts)
	})
	if errors.Is(err, memview.ErrLost) {
		err = fmt.Errorf("a page cannot be read: %w", err)
	}
	return err
}

// hostAddr is where a page lies in this process.
func (r *ram) hostAddr(page uint64) uintptr {
	off := page * snapshot.PageSize
	for i, region := range r.mem.Regions() {
		if size := uint64(len(region.Bytes)); off >= size {
			off -= size
			continue
		}
		return r.mem.HostAddr(i) + uintptr(off)
	}
	return 0
}
