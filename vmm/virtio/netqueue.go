package virtio

import (
	"errors"

	"golang.org/x/sys/unix"

	"torpor/vmm/ratelimit"
	"torpor/vmm/virtio/mmio"
	"torpor/vmm/virtio/virtq"
)

// netBatch is how many frames are moved at most before the driver hears of them.
const netBatch = 32

// netQueue is what both directions have in common: a queue, and what wakes its goroutine. All of it is that goroutine's.
type netQueue struct {
	dev     *Net
	queue   *virtq.Queue
	irq     mmio.Interrupt
	kick    <-chan struct{}
	limit   *ratelimit.Limiter
	pending int // chains pushed that the driver was not interrupted for
	iov     []unix.Iovec
}

// push gives chains back to the driver.
func (q *netQueue) push(used ...virtq.Used) error {
	q.pending++
	if err := q.queue.PushAll(used...); err != nil {
		return err
	}
	if q.pending >= netBatch {
		q.signal()
	}
	return nil
}

// signal interrupts the driver for what was pushed, if it wants that. It comes before every wait.
func (q *netQueue) signal() {
	if q.pending == 0 {
		return
	}
	q.pending = 0
	if q.queue.NeedsInterrupt() {
		q.irq.Used()
	}
}

// await waits for the driver to make a chain available. It reports false if quit was closed first.
func (q *netQueue) await(quit <-chan struct{}) (bool, error) {
	for {
		if more, err := q.queue.AwaitMore(); more || err != nil {
			return more, err
		}
		q.signal()
		select {
		case <-q.kick:
		case <-quit:
			return false, nil
		}
	}
}

// afford waits until the limit lets a frame of n bytes through. It reports false if quit was closed first.
func (q *netQueue) afford(n uint64, quit <-chan struct{}) bool {
	for {
		wait := q.limit.Take(n)
		if wait == 0 {
			return true
		}
		q.signal()
		due := make(chan struct{})
		stop := q.limit.After(wait, func() { close(due) })
		select {
		case <-due:
		case <-quit:
			stop()
			return false
		}
	}
}

// appendIovec appends b, which is not empty.
func appendIovec(iov []unix.Iovec, b []byte) []unix.Iovec {
	v := unix.Iovec{Base: &b[0]}
	v.SetLen(len(b))
	return append(iov, v)
}

// gone reports whether err is one after which a tap serves no more, rather than about one frame.
func gone(err error) bool {
	var errno unix.Errno
	if !errors.As(err, &errno) {
		return true // end of file, or the poller gave up
	}
	// The interface was removed; or, EPIPE, a socket in a tap's place has no peer any more.
	return errno == unix.EBADFD || errno == unix.ENODEV || errno == unix.EPIPE
}

// again reports that a system call would have to wait.
func again(err error) bool { return errors.Is(err, unix.EAGAIN) }
