package virtio

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// readv and writev are the system calls, without the copy of the vector that package unix makes at each call. The memory that
// iov points at must stay mapped meanwhile; Base pointers keep Go's own alive.

// They are made as raw ones: on descriptors that do not block, the scheduler need not know of them. To tell it is not cheap where
// calls come seldom: the runtime's monitor is woken, looks for ten milliseconds, some thousand times a second, whether they last,
// and takes the processor from whoever has work.

func readv(fd int, iov []unix.Iovec) (int, error)  { return vector(unix.SYS_READV, fd, iov) }
func writev(fd int, iov []unix.Iovec) (int, error) { return vector(unix.SYS_WRITEV, fd, iov) }

func vector(trap uintptr, fd int, iov []unix.Iovec) (int, error) {
	for {
		n, _, errno := unix.RawSyscall(trap, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(iov))), uintptr(len(iov)))
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}

// peek returns 1 if the socket has something to read, and 0 with no error if its end.
func peek(fd int) (int, error) {
	var b [1]byte
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&b)), 1, unix.MSG_PEEK|unix.MSG_DONTWAIT, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}
