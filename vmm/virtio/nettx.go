package virtio

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"torpor/vmm/virtio/virtq"
)

// netSender moves frames from the guest to the tap, straight from guest memory but for the header: that is copied and checked,
// since the host's kernel acts on it.
type netSender struct {
	netQueue
	features uint64
	chain    virtq.Chain
	header   [netHeaderBytes]byte
	pieces   [][]byte // scratch

	try func(fd uintptr) bool // tryWrite
	err error                 // its result
}

func newNetSender(dev *Net, queue *virtq.Queue, features uint64) *netSender {
	s := &netSender{
		netQueue: netQueue{dev: dev, queue: queue, irq: dev.irq, kick: dev.kicks[netTX], limit: dev.limit.TX},
		features: features,
	}
	s.try = s.tryWrite
	return s
}

// run moves frames until quit is closed or the queue breaks. Once the tap has gone away, it drops them.
func (s *netSender) run(quit <-chan struct{}) {
	err := s.serve(quit)
	s.signal()
	if err != nil {
		s.irq.NeedsReset()
	}
}

func (s *netSender) serve(quit <-chan struct{}) error {
	for {
		select {
		case <-quit:
			return nil
		default:
		}
		ok, err := s.queue.Pop(&s.chain)
		if err == nil && !ok {
			if ok, err = s.await(quit); ok {
				continue
			}
		}
		if !ok || err != nil {
			return err
		}
		if errors.Is(s.send(quit), errInterrupted) {
			s.queue.Unpop(1) // the tap is full, or the limit reached; it will be tried again
			return nil
		}
		if err := s.push(virtq.Used{Head: s.chain.Head}); err != nil {
			return err
		}
	}
}

// send sends the frame in chain. The only error that it leaves to be seen to is errInterrupted.
func (s *netSender) send(quit <-chan struct{}) error {
	frame, ok := s.assemble()
	err := error(nil)
	if ok && !s.afford(frame, quit) {
		err = errInterrupted
	} else if ok {
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
