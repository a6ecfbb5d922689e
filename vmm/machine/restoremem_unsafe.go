package machine

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// mapSpan replaces a span of guest memory by a private mapping of a layer's file, or of zeros if there is none.
func (r *ram) mapSpan(f *os.File, s span) error {
	b := r.slice(s.page, s.pages)
	if uint64(len(b)) != s.bytes() {
		return errCrossesHole(s.page)
	}
	fd, flags, offset := -1, unix.MAP_FIXED|unix.MAP_PRIVATE|unix.MAP_NORESERVE, int64(0)
	if f == nil {
		flags |= unix.MAP_ANONYMOUS
	} else {
		fd, offset = int(f.Fd()), int64(s.offset)
	}
	_, err := unix.MmapPtr(fd, offset, unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b)), unix.PROT_READ|unix.PROT_WRITE, flags)
	return os.NewSyscallError("mmap", err)
}
