package guestmem

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// MapAnon maps size bytes of zeroed memory that takes room only where it is touched.
func MapAnon(size uint64) ([]byte, error) {
	return mapMemory(-1, 0, size, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
}

// MapPrivate maps size bytes of the open file at off, copy-on-write: the file is never changed, and pages that were only read
// are shared with everyone who maps it. The file may be closed afterwards; cutting it short breaks the mapping.
func MapPrivate(fd int, off int64, size uint64) ([]byte, error) {
	return mapMemory(fd, off, size, unix.MAP_PRIVATE|unix.MAP_NORESERVE)
}

func mapMemory(fd int, off int64, size uint64, flags int) ([]byte, error) {
	if size == 0 || size%PageSize != 0 || size > 1<<46 {
		return nil, fmt.Errorf("map guest memory: %d bytes are not whole pages", size)
	}
	b, err := unix.Mmap(fd, off, int(size), unix.PROT_READ|unix.PROT_WRITE, flags)
	if err != nil {
		return nil, fmt.Errorf("map guest memory: %w", os.NewSyscallError("mmap", err))
	}
	return b, nil
}

// Unmap undoes MapAnon or MapPrivate. Nothing may touch b, or a Memory made of it, afterwards.
func Unmap(b []byte) error { return os.NewSyscallError("munmap", unix.Munmap(b)) }
