package machine

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// bell is an eventfd by which KVM tells of a guest's notification of one queue, to the one goroutine that waits for it.
type bell interface {
	fd() int
	// wait returns true when the bell was rung since the last time, and false once it is silenced.
	wait() bool
	// silence ends wait, and close frees the descriptor, after the goroutine has gone.
	silence()
	close()
}

func newEventfd(flags int) (int, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|flags)
	if err != nil {
		return -1, fmt.Errorf("eventfd: %w", os.NewSyscallError("eventfd2", err))
	}
	return fd, nil
}

// polledBell is waited for in the runtime's poller, which costs nothing while nothing comes: that is for queues with little to do.
type polledBell struct {
	f      *os.File
	number int
}

func newPolledBell() (bell, error) {
	fd, err := newEventfd(unix.EFD_NONBLOCK)
	if err != nil {
		return nil, err
	}
	return &polledBell{os.NewFile(uintptr(fd), "notifications"), fd}, nil
}

func (b *polledBell) fd() int { return b.number }

func (b *polledBell) wait() bool {
	var counter [8]byte
	_, err := b.f.Read(counter[:])
	return err == nil
}

func (b *polledBell) silence() { _ = b.f.Close() }

func (b *polledBell) close() {}

// threadBell is waited for inside a system call, by a thread: the kernel wakes that very thread, without poller, scheduler and
// other threads in between. It is for queues whose latency matters.
type threadBell struct {
	number int
	over   atomic.Bool
}

func newThreadBell() (bell, error) {
	fd, err := newEventfd(0)
	if err != nil {
		return nil, err
	}
	return &threadBell{number: fd}, nil
}

func (b *threadBell) fd() int { return b.number }

func (b *threadBell) wait() bool {
	var counter [8]byte
	for {
		_, err := unix.Read(b.number, counter[:])
		if !errors.Is(err, unix.EINTR) {
			return err == nil && !b.over.Load()
		}
	}
}

func (b *threadBell) silence() {
	b.over.Store(true)
	// It cannot fail: a counter that is full by the guest's notifications has its reader awake already.
	_, _ = unix.Write(b.number, []byte{1, 0, 0, 0, 0, 0, 0, 0})
}

func (b *threadBell) close() { _ = unix.Close(b.number) }
