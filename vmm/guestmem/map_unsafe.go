package guestmem

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// mapAligned maps size bytes at a multiple of hugePage: it reserves that much address space and a large page more, maps into it,
// and gives back what is left at both ends.
func mapAligned(fd int, off int64, size uintptr, flags int) (_ []byte, err error) {
	whole := size + hugePage
	area, err := unix.MmapPtr(-1, 0, nil, whole, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, err
	}
	head := -uintptr(area) & (hugePage - 1)
	start := unsafe.Add(area, head)
	if _, err := unix.MmapPtr(fd, off, start, size, unix.PROT_READ|unix.PROT_WRITE, flags|unix.MAP_FIXED); err != nil {
		_ = unix.MunmapPtr(area, whole)
		return nil, err
	}
	if head > 0 {
		err = unix.MunmapPtr(area, head)
	}
	if tail := hugePage - head; tail > 0 && err == nil {
		err = unix.MunmapPtr(unsafe.Add(start, size), tail)
	}
	if err != nil {
		_ = unix.MunmapPtr(start, size)
		return nil, err
	}
	return unsafe.Slice((*byte)(start), size), nil
}

func unmap(b []byte) error {
	return unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b)))
}
