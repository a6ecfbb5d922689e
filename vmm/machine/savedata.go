package machine

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"torpor/vmm/ratelimit"
	"torpor/vmm/snapshot"
)

// directBytes is from how much data on a save bypasses the page cache. Less is written through it: it costs little, and the next
// wake finds it there.
const directBytes = 64 << 20

// writeData writes the data of all runs to their places, straight from memory, several batches at once, and sets the checksums.
func (j *layerJob) writeData(b *snapshot.LayerBuilder) error {
	if err := preallocate(j.f, b.FileBytes()); err != nil {
		return err
	}
	batches := dataBatches(b.Runs)
	out := &dataFile{f: j.f}
	if b.FileBytes() >= directBytes {
		out.setDirect(true)
		defer out.setDirect(false)
	}
	return parallel(len(batches), func() func(int) error {
		return func(i int) error { return j.writeBatch(out, batches[i]) }
	})
}

// preallocate makes the file as long as it will be and finds the room for it, so that a disk that is full is known before
// anything is written, and writes need not find it one by one.
func preallocate(f *os.File, size uint64) error {
	err := unix.Fallocate(int(f.Fd()), 0, 0, int64(size))
	if errors.Is(err, unix.EOPNOTSUPP) {
		return f.Truncate(int64(size))
	}
	return os.NewSyscallError("fallocate", err)
}

// dataBatches cuts runs into pieces of at most ChunkBytes of data, which follow each other in the file. Runs without data are left
// out.
func dataBatches(runs []snapshot.Run) (out [][]*snapshot.Run) {
	var batch []*snapshot.Run
	size := 0
	for i := range runs {
		r := &runs[i]
		if r.Kind != snapshot.RunData {
			continue
		}
		if size+r.Bytes() > snapshot.ChunkBytes {
			out, batch, size = append(out, batch), nil, 0
		}
		batch, size = append(batch, r), size+r.Bytes()
	}
	if len(batch) > 0 {
		out = append(out, batch)
	}
	return out
}

func (j *layerJob) writeBatch(out *dataFile, batch []*snapshot.Run) error {
	ranges := make([]pageRange, len(batch))
	size := 0
	for i, r := range batch {
		ranges[i] = pageRange{r.Page, uint64(r.Pages)}
		size += r.Bytes()
	}
	j.pace.wait(size)
	return j.from.read(ranges, func(b [][]byte) error {
		for i, r := range batch {
			if err := guarded(b[i], func() error { r.Sum = snapshot.Checksum(b[i]); return nil }); err != nil {
				return err
			}
		}
		return out.write(b, int64(batch[0].Offset))
	})
}

// dataFile is where page-aligned data goes.
type dataFile struct{ f *os.File }

// setDirect turns direct I/O on, where the file system has it, or off.
func (d *dataFile) setDirect(on bool) {
	flags, err := unix.FcntlInt(d.f.Fd(), unix.F_GETFL, 0)
	if err != nil {
		return
	}
	flags &^= unix.O_DIRECT
	if on {
		flags |= unix.O_DIRECT
	}
	_, _ = unix.FcntlInt(d.f.Fd(), unix.F_SETFL, flags) // without it the data goes through the page cache
}

// write writes slices one behind the other.
func (d *dataFile) write(b [][]byte, off int64) error {
	for len(b) > 0 {
		n, err := unix.Pwritev(int(d.f.Fd()), b, off)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EINVAL) && d.isDirect(): // a file system that takes the flag and then wants other alignment
			d.setDirect(false)
			continue
		case err != nil:
			return fmt.Errorf("write memory layer: %w", os.NewSyscallError("pwritev", err))
		}
		off += int64(n)
		b = skip(b, n)
	}
	return nil
}

func (d *dataFile) isDirect() bool {
	flags, err := unix.FcntlInt(d.f.Fd(), unix.F_GETFL, 0)
	return err == nil && flags&unix.O_DIRECT != 0
}

// skip returns what of slices is left after n bytes.
func skip(b [][]byte, n int) [][]byte {
	for len(b) > 0 && n >= len(b[0]) {
		n, b = n-len(b[0]), b[1:]
	}
	if n > 0 {
		b = append([][]byte{b[0][n:]}, b[1:]...)
	}
	return b
}

// pace bounds how much is written in a second. A nil pace bounds nothing.
type pace struct{ limiter *ratelimit.Limiter }

// paceStep is which part of a second's bytes may be written at once.
const paceStep = 10

func newPace(bytesPerSecond uint64) (*pace, error) {
	if bytesPerSecond == 0 {
		return nil, nil
	}
	rate := ratelimit.Bucket{Size: bytesPerSecond, Refill: time.Second}
	if bytesPerSecond >= paceStep { // so that little comes at once
		rate = ratelimit.Bucket{Size: bytesPerSecond / paceStep, Refill: time.Second / paceStep}
	}
	l, err := ratelimit.New(ratelimit.Limit{Bytes: rate}, ratelimit.System())
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	return &pace{l}, nil
}

// wait returns when n bytes more may be written.
func (p *pace) wait(n int) {
	if p == nil {
		return
	}
	for {
		d := p.limiter.Take(uint64(n))
		if d == 0 {
			return
		}
		ready := make(chan struct{})
		p.limiter.After(d, func() { close(ready) })
		<-ready
	}
}
