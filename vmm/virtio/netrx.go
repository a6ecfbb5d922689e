package virtio

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"golang.org/x/sys/unix"

	"torpor/vmm/virtio/virtq"
)

// netMaxPieces bounds the pieces of guest memory one frame is read into; a chain has at most as many as the queue has
// descriptors, and a system call takes 1,024.
const netMaxPieces = 2 * netQueueSize

// netReceiver moves frames from the tap to the guest. A frame is read straight into the chains the driver left, as many as the
// longest one may need if the driver merges them; what they cannot take goes into a buffer of ours, so that no frame is cut.
type netReceiver struct {
	netQueue
	merge bool
	want  uint64 // bytes of room to read with, if the driver has it

	held   []netRoom // popped, first come first filled
	room   uint64    // bytes in all of held
	pieces [][]byte  // guest memory of held, in order
	stuck  bool      // a useless chain follows those held
	spill  []byte
	used   []virtq.Used   // scratch
	free   []*virtq.Chain // storage

	try func(fd uintptr) bool // tryRead
	n   int                   // its results
	err error
}

// netRoom is a chain of the driver's to be filled.
type netRoom struct {
	*virtq.Chain
	pieces int
}

func newNetReceiver(dev *Net, queue *virtq.Queue, features uint64) *netReceiver {
	r := &netReceiver{
		netQueue: netQueue{dev: dev, queue: queue, irq: dev.irq, kick: dev.kicks[netRX], limit: dev.limit.RX},
		merge:    features&netMergeRX != 0,
		want:     netHeaderBytes,
		spill:    make([]byte, netHeaderBytes+netMaxFrame+1), // one more, to tell longer ones
	}
	if r.merge && features&(netGuestTSO4|netGuestTSO6) != 0 {
		r.want += netMaxFrame
	}
	r.try = r.tryRead
	return r
}

// run moves frames until quit is closed, the queue breaks or the tap goes away.
func (r *netReceiver) run(quit <-chan struct{}) {
	defer r.putBack()
	err := r.serve(quit)
	r.signal()
	if errors.Is(err, virtq.ErrBroken) {
		r.irq.NeedsReset()
	} else if err != nil {
		r.dev.lose(err)
	}
}

func (r *netReceiver) serve(quit <-chan struct{}) error {
	for {
		if err := r.gather(r.want); err != nil {
			return err
		}
		if len(r.held) == 0 {
			// The tap is not read meanwhile: it keeps some frames and drops the rest.
			if ok, err := r.await(quit); !ok || err != nil {
				return err
			}
			continue
		}
		n, err := r.read()
		switch {
		case errors.Is(err, errInterrupted):
			return nil
		case errors.Is(err, unix.EFAULT): // a bad page in one of them
			r.dev.count.rxDropped.Add(1)
			err = r.give(len(r.held), 0)
		case err != nil:
			return fmt.Errorf("%w: %w", errTapGone, err)
		default:
			err = r.deliver(uint64(n), quit)
		}
		if err != nil {
			return err
		}
	}
}

// gather pops chains until there is room for want bytes, or as much as the driver has. A chain that cannot take a frame's
// header is given back as it is once it is the first in line; what follows it waits until then.
func (r *netReceiver) gather(want uint64) error {
	r.stuck = false
	for r.room < want && !r.full() {
		c := r.storage()
		ok, err := r.queue.Pop(c)
		if !ok || err != nil {
			r.free = append(r.free, c)
			return err
		}
		before := len(r.pieces)
		pieces, err := c.AppendWritable(r.pieces, 0)
		if err == nil && c.WriteLen() >= netHeaderBytes {
			r.pieces = pieces
			r.room += c.WriteLen()
			r.held = append(r.held, netRoom{c, len(pieces) - before})
			continue
		}
		r.free = append(r.free, c)
		if len(r.held) > 0 {
			r.stuck = true
			r.queue.Unpop(1)
			return nil
		}
		if err := r.push(virtq.Used{Head: c.Head}); err != nil {
			return err
		}
	}
	return nil
}

// full reports whether no more chains can be held.
func (r *netReceiver) full() bool {
	return len(r.pieces) > netMaxPieces-netQueueSize || len(r.held) == int(r.queue.Size())
}

func (r *netReceiver) storage() *virtq.Chain {
	last := len(r.free) - 1
	if last < 0 {
		return &virtq.Chain{}
	}
	c := r.free[last]
	r.free = r.free[:last]
	return c
}

// read waits for a frame and returns how long it is, header included; of one that is too long, some more than the longest.
// What has room in held is there, the rest in spill.
func (r *netReceiver) read() (int, error) {
	pieces := r.pieces
	if !r.merge {
		pieces = pieces[:r.held[0].pieces]
	}
	r.iov = r.iov[:0]
	for _, p := range pieces {
		r.iov = appendIovec(r.iov, p)
	}
	r.iov = appendIovec(r.iov, r.spill)
	if err := r.dev.tap.conn.Read(r.try); err != nil {
		return 0, err
	}
	if r.n == 0 && r.err == nil {
		return 0, io.ErrUnexpectedEOF
	}
	return r.n, r.err
}

func (r *netReceiver) tryRead(fd uintptr) bool {
	r.n, r.err = readv(int(fd), r.iov)
	if again(r.err) {
		r.signal()
		return false
	}
	return true
}

// deliver gives the guest the frame of n bytes that was read, header included. It is dropped if the driver's room turns out
// not to be enough for it, or if quit is closed while the driver is waited for.
func (r *netReceiver) deliver(n uint64, quit <-chan struct{}) error {
	ok := n >= netHeaderBytes+netMinFrame && n <= netHeaderBytes+netMaxFrame
	if ok && r.merge {
		var err error
		if ok, err = r.unspill(n, quit); err != nil {
			return err
		}
	} else if ok {
		ok = n <= r.held[0].WriteLen()
	}
	if !ok {
		r.dev.count.rxDropped.Add(1)
		if r.stuck { // or nothing longer than what is held would ever come through
			return r.give(len(r.held), 0)
		}
		return nil
	}
	// It cannot be put back into the tap: if the device is to stop it passes unpaid, one for each pause at most.
	_ = r.afford(n-netHeaderBytes, quit)
	chains := r.chainsFor(n)
	// The tap does not write this field. There is room for it: gather saw to that.
	if r.held[0].WriteAt(binary.LittleEndian.AppendUint16(nil, uint16(chains)), netNumBuffersOff) != nil {
		r.dev.count.rxDropped.Add(1)
		return r.give(chains, 0)
	}
	r.dev.count.rxFrames.Add(1)
	r.dev.count.rxBytes.Add(n - netHeaderBytes)
	return r.give(chains, n)
}

// chainsFor returns how many of the chains held n bytes take. Preconditions: they have the room.
func (r *netReceiver) chainsFor(n uint64) int {
	room := uint64(0)
	for i, c := range r.held {
		if room += c.WriteLen(); room >= n {
			return i + 1
		}
	}
	return len(r.held)
}

// unspill gathers room for n bytes and moves there what was read into spill. It reports false if that cannot be.
func (r *netReceiver) unspill(n uint64, quit <-chan struct{}) (bool, error) {
	at, next := r.room, len(r.held)
	for {
		if err := r.gather(n); err != nil {
			return false, err
		}
		if r.room >= n {
			break
		}
		if r.stuck || r.full() {
			return false, nil
		}
		if ok, err := r.await(quit); !ok || err != nil {
			return false, err
		}
	}
	for spilled := r.spill; at < n; next++ {
		piece := min(r.held[next].WriteLen(), n-at)
		if r.held[next].WriteAt(spilled[:piece], 0) != nil {
			return false, nil
		}
		spilled = spilled[piece:]
		at += piece
	}
	return true, nil
}

// give gives the first chains held back to the driver, with n bytes in them.
func (r *netReceiver) give(chains int, n uint64) error {
	r.used = r.used[:0]
	pieces := 0
	for _, c := range r.held[:chains] {
		written := min(c.WriteLen(), n)
		n -= written
		r.room -= c.WriteLen()
		pieces += c.pieces
		r.used = append(r.used, virtq.Used{Head: c.Head, Written: uint32(written)})
		r.free = append(r.free, c.Chain)
	}
	r.pieces = append(r.pieces[:0], r.pieces[pieces:]...)
	r.held = append(r.held[:0], r.held[chains:]...)
	return r.push(r.used...)
}

// putBack leaves the driver's chains in the queue as if they had not been seen.
func (r *netReceiver) putBack() {
	r.queue.Unpop(uint16(len(r.held)))
	for _, c := range r.held {
		r.free = append(r.free, c.Chain)
	}
	r.held, r.pieces, r.room = r.held[:0], r.pieces[:0], 0
}
