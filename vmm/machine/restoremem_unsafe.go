package machine

import (
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"torpor/vmm/snapshot"
)

// mapSpan replaces a span of guest memory by a private mapping of the diff file, or of zeros.
func (r *ram) mapSpan(f *os.File, s span) error {
	b := r.slice(s.page, s.pages)
	if uint64(len(b)) != s.bytes() {
		return &snapshot.Error{Part: "diff, table of runs", Err: fmt.Errorf("%w: a run crosses the hole", snapshot.ErrFormat)}
	}
	fd, flags, offset := int(f.Fd()), unix.MAP_FIXED|unix.MAP_PRIVATE|unix.MAP_NORESERVE, int64(s.offset)
	if s.kind == snapshot.RunZero {
		fd, flags, offset = -1, flags|unix.MAP_ANONYMOUS, 0
	}
	_, err := unix.MmapPtr(fd, offset, unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b)), unix.PROT_READ|unix.PROT_WRITE, flags)
	return os.NewSyscallError("mmap", err)
}
