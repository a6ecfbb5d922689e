package pid1

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// reaper is the only one in its process that waits for children. It reaps whatever ends, since orphans of the whole guest
// become children of PID 1, and hands the status of those it started to who waits for them.
type reaper struct {
	mu      sync.Mutex // held over a start, so that a child cannot be reaped before it is known
	waiting map[int]chan unix.WaitStatus
	changed chan struct{} // capacity 1: some child was reaped since it was last read
}

func newReaper() *reaper {
	return &reaper{waiting: map[int]chan unix.WaitStatus{}, changed: make(chan struct{}, 1)}
}

// start runs a program; its status arrives on the answered channel, once.
func (r *reaper) start(path string, argv []string, attr *syscall.ProcAttr) (int, <-chan unix.WaitStatus, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	pid, err := syscall.ForkExec(path, argv, attr)
	if err != nil {
		return 0, nil, fmt.Errorf("starting %s: %w", path, err)
	}
	status := make(chan unix.WaitStatus, 1)
	r.waiting[pid] = status
	return pid, status, nil
}

// reap collects all children that have ended; to be called after every SIGCHLD. It answers whether any are left.
func (r *reaper) reap() (left bool) {
	for reaped := 0; ; reaped++ {
		var status unix.WaitStatus
		r.mu.Lock()
		pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
		waiter, known := r.waiting[pid]
		if err == nil && pid > 0 && known {
			delete(r.waiting, pid)
			waiter <- status
		}
		r.mu.Unlock()
		if err == nil && pid > 0 || errors.Is(err, unix.EINTR) {
			continue
		}
		if reaped > 0 {
			select {
			case r.changed <- struct{}{}:
			default:
			}
		}
		return err == nil // else ECHILD
	}
}

// run serves SIGCHLD until stop is closed.
func (r *reaper) run(children <-chan os.Signal, stop <-chan struct{}) {
	for {
		r.reap() // first once without a signal: children may have ended before
		select {
		case <-children:
		case <-stop:
			return
		}
	}
}
