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
	// serve calls ring when the bell was rung since the last time, and perhaps once more, until it is silenced.
	serve(ring func())
	// silence ends serve, and close frees the descriptor, after the goroutine has gone.
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

// polledBell is waited for in the runtime's poller. That costs nothing while nothing comes, and is no system call to the scheduler, whose
// monitor sleeps on (vmm/kvm, enter): it is for queues with little to do, or whose work is done without system calls that may wait.
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

// serve never reads the counter: the poller sees edges, and each write to an eventfd is one.
func (b *polledBell) serve(ring func()) {
	conn, err := b.f.SyscallConn()
	if err != nil {
		return // it is closed already
	}
	_ = conn.Read(func(uintptr) bool { // ends with the file
		ring()
		return false
	})
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

func (b *threadBell) serve(ring func()) {
	var counter [8]byte
	for {
		_, err := unix.Read(b.number, counter[:])
		switch {
		case b.over.Load() || err != nil && !errors.Is(err, unix.EINTR):
			return
		case err == nil:
			ring()
		}
	}
}

func (b *threadBell) silence() {
	b.over.Store(true)
	// It cannot fail: a counter that is full by the guest's notifications has its reader awake already.
	_, _ = unix.Write(b.number, []byte{1, 0, 0, 0, 0, 0, 0, 0})
}

func (b *threadBell) close() { _ = unix.Close(b.number) }
