package cow

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// storage is what a layer lies on: a file, or in tests a disk that loses what was not synced.
type storage interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
	// readv fills bufs from off on and says how much of them it filled; less than all without an error is the end of the file.
	// The buffers may be guest memory: one that cannot be accessed is an error, EFAULT. So with writev, which writes all.
	readv(bufs [][]byte, off int64) (int64, error)
	writev(bufs [][]byte, off int64) error
	size() (int64, error)
	// next is the first offset from off on that may hold anything but zeros; the end if there is none.
	next(off int64) (int64, error)
	resize(size int64) error
	// sync returns once all that was written before it is durable.
	sync() error
	// punch makes n bytes at off zero and gives their room back. It is an economy: where it cannot be had, nothing happens.
	punch(off, n int64)
	// clone makes n bytes at off share the room of those of from at its offset at, and reports whether it could: it needs a
	// file system with reflinks, and whole blocks.
	clone(off int64, from storage, at, n int64) bool
	// lock keeps other writers out, until unlock or the file is closed, be it by the process's death.
	lock() error
	unlock() error
}

// file is the storage of a layer in a file.
type file struct{ *os.File }

func (f file) size() (int64, error) {
	stat, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return stat.Size(), nil
}

func (f file) next(off int64) (int64, error) {
	at, err := f.Seek(off, unix.SEEK_DATA)
	switch {
	case errors.Is(err, unix.ENXIO):
		return f.size()
	case errors.Is(err, unix.EINVAL): // a file system that does not know of holes
		return off, nil
	}
	return at, err
}

func (f file) resize(size int64) error { return f.Truncate(size) }

func (f file) readv(bufs [][]byte, off int64) (int64, error) {
	return eachv(bufs, off, "preadv", unix.Preadv, int(f.Fd()))
}

func (f file) writev(bufs [][]byte, off int64) error {
	n, err := eachv(bufs, off, "pwritev", unix.Pwritev, int(f.Fd()))
	if err == nil && n < vec(bufs).bytes() {
		err = io.ErrShortWrite
	}
	return err
}

// maxVec is the most buffers the kernel takes at once (UIO_MAXIOV).
const maxVec = 1024

// eachv calls a vectored system call until all of bufs is done, or it fails, or it does nothing more. It uses bufs up.
func eachv(bufs [][]byte, off int64, name string, call func(int, [][]byte, int64) (int, error), fd int) (done int64, err error) {
	left := vec(bufs)
	for {
		left = left.drop(0) // buffers without bytes
		if len(left) == 0 {
			return done, nil
		}
		n, err := call(fd, left[:min(len(left), maxVec)], off+done)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return done, os.NewSyscallError(name, err)
		case n == 0:
			return done, nil
		}
		done += int64(n)
		left = left.drop(int64(n))
	}
}

func (f file) sync() error {
	for {
		err := unix.Fdatasync(int(f.Fd()))
		if !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("fdatasync", err)
		}
	}
}

func (f file) punch(off, n int64) {
	_ = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
}

func (f file) clone(off int64, from storage, at, n int64) bool {
	src, ok := from.(file)
	return ok && unix.IoctlFileCloneRange(int(f.Fd()), &unix.FileCloneRange{
		Src_fd: int64(src.Fd()), Src_offset: uint64(at), Src_length: uint64(n), Dest_offset: uint64(off),
	}) == nil
}

func (f file) lock() error {
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EWOULDBLOCK):
			return fmt.Errorf("%s: %w", f.Name(), ErrInUse)
		}
		return os.NewSyscallError("flock", err)
	}
}

func (f file) unlock() error {
	return os.NewSyscallError("flock", unix.Flock(int(f.Fd()), unix.LOCK_UN))
}
