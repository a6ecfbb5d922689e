package machine

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"torpor/vmm/snapshot"
)

// mapBase replaces pages of guest memory, which lie in one region, by a private mapping of the base.
func (r *ram) mapBase(p pageRange) error {
	b := r.slice(p.first, p.n)
	_, err := unix.MmapPtr(int(r.from.base.Fd()), int64(p.first*snapshot.PageSize), unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b)),
		unix.PROT_READ|unix.PROT_WRITE, unix.MAP_FIXED|unix.MAP_PRIVATE|unix.MAP_NORESERVE)
	return os.NewSyscallError("mmap", err)
}
