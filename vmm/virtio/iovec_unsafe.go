package virtio

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// readv and writev are the system calls, without the copy of the vector that package unix makes at each call. The memory that
// iov points at must stay mapped meanwhile; Base pointers keep Go's own alive.

func readv(fd int, iov []unix.Iovec) (int, error)  { return vector(unix.SYS_READV, fd, iov) }
func writev(fd int, iov []unix.Iovec) (int, error) { return vector(unix.SYS_WRITEV, fd, iov) }

func vector(trap uintptr, fd int, iov []unix.Iovec) (int, error) {
	for {
		n, _, errno := unix.Syscall(trap, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(iov))), uintptr(len(iov)))
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}
