package control

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// randPool is struct rand_pool_info of linux/random.h.
type randPool struct {
	bits, size int32
	data       [maxEntropy]byte
}

// addEntropy mixes entropy into the kernel's pool and credits all of its bits. It must not be longer than maxEntropy.
func addEntropy(random *os.File, entropy []byte) error {
	pool := randPool{bits: int32(8 * len(entropy)), size: int32(len(entropy))}
	copy(pool.data[:], entropy)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, random.Fd(), unix.RNDADDENTROPY, uintptr(unsafe.Pointer(&pool)))
	if errno != 0 {
		return errno
	}
	return nil
}
