package virtio

import (
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"torpor/vmm/virtio/virtq"
)

// netSender moves frames from the guest to the tap, straight from guest memory but for the header: that is copied and checked,
// since the host's kernel acts on it.
//
// Whoever gets the guest's notification sends what can be sent at once; what must wait, for the tap or for tokens, is sent by the
// sender's own goroutine.
type netSender struct {
	mu      sync.Mutex // guards all below; held while the goroutine waits with a frame in hand
	stopped bool       // nothing may be sent

	netQueue
	features uint64
	chain    virtq.Chain
	header   [netHeaderBytes]byte
	pieces   [][]byte // scratch

	try    func(fd uintptr) bool // tryWrite
	tryNow func(fd uintptr)      // tryWriteNow
	err    error                 // their result
}

func newNetSender(dev *Net, queue *virtq.Queue, features uint64) *netSender {
	s := &netSender{
		netQueue: netQueue{dev: dev, queue: queue, irq: dev.irq, kick: dev.kicks[netTX], limit: dev.limit.TX},
		features: features,
	}
	s.try, s.tryNow = s.tryWrite, s.tryWriteNow
	return s
}

// run moves frames until quit is closed or the queue breaks. Once the tap has gone away, it drops them.
func (s *netSender) run(quit <-chan struct{}) {
	for {
		select {
		case <-quit:
			return
		default:
		}
		more, err := s.turn(quit)
		if err != nil {
			s.irq.NeedsReset()
			return
		}
		if more {
			continue
		}
		select {
		case <-s.kick:
		case <-quit:
			return
		}
	}
}

// serve sends what can be sent at once, and leaves the rest to run. It is for who got a notification.
func (s *netSender) serve() {
	if s.mu.TryLock() { // else run is at it, and looks again
		more, err := s.turnLocked(nil)
		s.mu.Unlock()
		if err != nil {
			s.irq.NeedsReset()
		}
		if !more {
			return
		}
	}
	s.dev.Notify(netTX)
}

// stop returns when serve sends no more, until start.
func (s *netSender) stop() { s.setStopped(true) }

func (s *netSender) start() { s.setStopped(false) }

func (s *netSender) setStopped(stopped bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped = stopped
}

func (s *netSender) turn(quit <-chan struct{}) (more bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.turnLocked(quit)
}

// turnLocked sends some frames and reports whether there may be more to do; if not, the driver will notify. It waits for the tap and
// for tokens until quit is closed; if quit is nil, not at all.
func (s *netSender) turnLocked(quit <-chan struct{}) (more bool, err error) {
	if s.stopped {
		return false, nil
	}
	defer s.signal()
	for range 2 * netBatch {
		ok, err := s.queue.Pop(&s.chain)
		if err == nil && !ok {
			s.signal() // before it is asked for more
			if ok, err = s.queue.AwaitMore(); ok {
				continue
			}
		}
		if !ok || err != nil {
			return false, err
		}
		if errors.Is(s.send(quit), errInterrupted) {
			s.queue.Unpop(1) // the tap is full, or the limit reached; it will be tried again
			return true, nil
		}
		if err := s.push(virtq.Used{Head: s.chain.Head}); err != nil {
			return false, err
		}
	}
	return true, nil
}

// send sends the frame in chain. The only error that it leaves to be seen to is errInterrupted.
func (s *netSender) send(quit <-chan struct{}) error {
	frame, ok := s.assemble()
	err := error(nil)
	switch {
	case !ok:
	case quit == nil && s.limit.Take(frame) > 0, quit != nil && !s.afford(frame, quit):
		err = errInterrupted
	case quit == nil:
		err = s.writeNow()
	default:
		err = s.write()
	}
	switch {
	case ok && err == nil:
		s.dev.count.txFrames.Add(1)
		s.dev.count.txBytes.Add(frame)
		return nil
	case errors.Is(err, errInterrupted):
		return err
	case err != nil && gone(err):
		s.dev.lose(fmt.Errorf("%w: %w", errTapGone, err))
	}
	// Malformed, or refused by the host's kernel: its interface is down (EIO), its memory short, the header nonsense.
	s.dev.count.txDropped.Add(1)
	return nil
}

// assemble makes header and iov of the frame in chain and returns its length. It reports false if it is no frame.
func (s *netSender) assemble() (uint64, bool) {
	total := s.chain.ReadLen()
	if total < netHeaderBytes+netMinFrame || total > netHeaderBytes+netMaxFrame {
		return 0, false
	}
	frame := total - netHeaderBytes
	if s.chain.ReadAt(s.header[:], 0) != nil || !checkFrame(&s.header, s.features, frame) {
		return 0, false
	}
	var err error
	if s.pieces, err = s.chain.AppendReadable(s.pieces[:0], netHeaderBytes); err != nil {
		return 0, false
	}
	s.iov = appendIovec(s.iov[:0], s.header[:])
	for _, p := range s.pieces {
		s.iov = appendIovec(s.iov, p)
	}
	return frame, true
}

// write waits until the tap takes the frame in iov.
func (s *netSender) write() error {
	if err := s.dev.tap.conn.Write(s.try); err != nil {
		return err
	}
	return s.err
}

// writeNow is write that fails with errInterrupted if the tap is full.
func (s *netSender) writeNow() error {
	if err := s.dev.tap.conn.Control(s.tryNow); err != nil {
		return err
	}
	if again(s.err) {
		return errInterrupted
	}
	return s.err
}

func (s *netSender) tryWriteNow(fd uintptr) { _, s.err = writev(int(fd), s.iov) }

func (s *netSender) tryWrite(fd uintptr) bool {
	_, s.err = writev(int(fd), s.iov)
	if !again(s.err) {
		return true
	}
	s.signal()
	// The runtime's poller waits for an edge, and a tap announces that it can be written again only to those who have seen by
	// poll(2) that it could not. So look; and if it can by now, no edge will come.
	look := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
	if n, err := unix.Poll(look, 0); err != nil || n == 0 {
		return false
	}
	_, s.err = writev(int(fd), s.iov)
	return !again(s.err)
}
