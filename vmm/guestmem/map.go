package guestmem

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// hugePage is the size of a large page of the CPU (SDM volume 3, section 4.5), in bytes.
const hugePage = 2 << 20

// MapAnon maps size bytes of zeroed memory that takes room only where it is touched, in large pages where the kernel has some: a
// guest that touches 100 MiB in small ones leaves for the host 25,000 times to get them.
func MapAnon(size uint64) ([]byte, error) {
	b, err := mapMemory(-1, 0, size, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, err
	}
	_ = unix.Madvise(b, unix.MADV_HUGEPAGE) // a wish: a kernel without large pages refuses it, and small ones do
	return b, nil
}

// MapPrivate maps size bytes of the open file at off, copy-on-write: the file is never changed, and pages that were only read
// are shared with everyone who maps it. The file may be closed afterwards; cutting it short breaks the mapping.
func MapPrivate(fd int, off int64, size uint64) ([]byte, error) {
	return mapMemory(fd, off, size, unix.MAP_PRIVATE|unix.MAP_NORESERVE)
}

// mapMemory maps at a multiple of hugePage, since the guest sees a large page only where both its addresses and ours are aligned.
func mapMemory(fd int, off int64, size uint64, flags int) ([]byte, error) {
	if size == 0 || size%PageSize != 0 || size > 1<<46 {
		return nil, fmt.Errorf("map guest memory: %d bytes are not whole pages", size)
	}
	b, err := mapAligned(fd, off, uintptr(size), flags)
	if err != nil {
		return nil, fmt.Errorf("map guest memory: %w", os.NewSyscallError("mmap", err))
	}
	return b, nil
}

// Unmap undoes MapAnon or MapPrivate. Nothing may touch b, or a Memory made of it, afterwards.
func Unmap(b []byte) error { return os.NewSyscallError("munmap", unmap(b)) }
