package machine

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// eventfd is a kernel counter that wakes its reader. The owner closes it after every user has gone.
type eventfd int

func newEventfd() (eventfd, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return -1, fmt.Errorf("eventfd: %w", os.NewSyscallError("eventfd2", err))
	}
	return eventfd(fd), nil
}

var one = []byte{1, 0, 0, 0, 0, 0, 0, 0}

// signal adds one. It does not block: a counter at its limit has its reader awake already.
func (e eventfd) signal() { _, _ = unix.Write(int(e), one) }

func (e eventfd) close() { _ = unix.Close(int(e)) }
