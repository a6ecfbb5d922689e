// Package virtq is the device's side of a split virtqueue (virtio 1.2, section 2.7) over guest memory.
//
// Everything in a ring is written by the guest and may change while we look. A descriptor is read once, into private memory,
// and only the copy is believed; a chain is at most as long as the queue, so loops end; indirect tables are not offered and
// refused. A queue whose driver broke the rules answers ErrBroken from then on, and the device asks for a reset.
//
// A Queue is not safe for concurrent use: the device that owns it takes care of that.
package virtq

import (
	"errors"
	"fmt"

	"torpor/vmm/guestmem"
)

// MaxSize is the largest queue the format has, in descriptors.
const MaxSize = 32768

// Flags of descriptors and of the available ring (virtio 1.2, sections 2.7.5 and 2.7.6).
const (
	descNext     = 1
	descWrite    = 2
	descIndirect = 4

	availNoInterrupt = 1

	descBytes = 16
)

// ErrBroken means that the driver broke the ring's rules; only a reset of the device mends it.
var ErrBroken = errors.New("virtqueue broken by the driver")

// Config is where a driver put a queue.
type Config struct {
	Size  uint16 // descriptors, a power of two
	Desc  guestmem.Addr
	Avail guestmem.Addr
	Used  guestmem.Addr
}

// State is the part of a queue that is not in guest memory; it goes into snapshots.
type State struct {
	LastAvail uint16 // the next entry of the available ring to take, not reduced modulo the size
	NextUsed  uint16 // used.idx
}

// Queue is one virtqueue.
type Queue struct {
	mem      *guestmem.Memory
	cfg      Config
	eventIdx bool
	state    State
	// signalled is NextUsed as it was when the driver's wish for an interrupt was last looked at, if known.
	signalled      uint16
	signalledKnown bool
	broken         error
}

// New returns the queue at cfg, empty so far. It is an error if cfg is not what section 2.7 demands or not within RAM.
// eventIdx says whether VIRTIO_F_EVENT_IDX was negotiated.
func New(mem *guestmem.Memory, cfg Config, eventIdx bool) (*Queue, error) {
	n := uint64(cfg.Size)
	if n == 0 || n > MaxSize || n&(n-1) != 0 {
		return nil, fmt.Errorf("virtqueue of %d descriptors", n)
	}
	for _, part := range []struct {
		name  string
		at    guestmem.Addr
		align guestmem.Addr
		bytes uint64
	}{
		{"descriptor table", cfg.Desc, 16, descBytes * n},
		{"available ring", cfg.Avail, 2, 6 + 2*n},
		{"used ring", cfg.Used, 4, 6 + 8*n},
	} {
		if part.at%part.align != 0 || !mem.Contains(part.at, part.bytes) {
			return nil, fmt.Errorf("virtqueue: %s at %#x is misaligned or outside memory", part.name, uint64(part.at))
		}
	}
	return &Queue{mem: mem, cfg: cfg, eventIdx: eventIdx}, nil
}

// Size returns the number of descriptors.
func (q *Queue) Size() uint16 { return q.cfg.Size }

// State returns what a snapshot must keep.
func (q *Queue) State() State { return q.state }

// SetState puts a queue where an earlier one was. The driver is signalled at the next occasion whatever it asked for.
func (q *Queue) SetState(s State) {
	q.state = s
	q.signalledKnown = false
}

// Pop takes the next available chain into c, whose storage is reused, and reports whether there was one.
// An error is ErrBroken, and stays.
func (q *Queue) Pop(c *Chain) (bool, error) {
	if q.broken != nil {
		return false, q.broken
	}
	idx, err := q.AvailIdx()
	if err != nil {
		return false, err
	}
	if idx == q.state.LastAvail {
		return false, nil
	}
	slot := q.cfg.Avail + 4 + 2*guestmem.Addr(q.state.LastAvail%q.cfg.Size)
	head, err := q.mem.ReadUint16(slot)
	if err != nil {
		return false, q.breakf("available ring: %w", err)
	}
	if err := q.walk(c, head); err != nil {
		return false, err
	}
	q.state.LastAvail++
	return true, nil
}

// AvailIdx returns the driver's index: it moves when the driver makes buffers available.
func (q *Queue) AvailIdx() (uint16, error) {
	idx, err := q.mem.LoadUint16(q.cfg.Avail + 2)
	if err != nil {
		return 0, q.breakf("available index: %w", err)
	}
	if ahead := idx - q.state.LastAvail; ahead > q.cfg.Size {
		return 0, q.breakf("available index %d is %d ahead", idx, ahead)
	}
	return idx, nil
}

// Unpop takes the last n calls of Pop back: the chains they returned will be popped again. None of them may have been pushed.
func (q *Queue) Unpop(n uint16) { q.state.LastAvail -= n }

// Used is a chain on its way back to the driver.
type Used struct {
	Head    uint16
	Written uint32 // bytes of its writable part that were written, from the start
}

// Push gives a chain back to the driver; written is how many bytes of its writable part were written, from the start.
func (q *Queue) Push(head uint16, written uint32) error {
	return q.PushAll(Used{Head: head, Written: written})
}

// PushAll gives chains back to the driver, which sees all of them or none. They are at most as many as the queue has
// descriptors.
func (q *Queue) PushAll(used ...Used) error {
	if q.broken != nil {
		return q.broken
	}
	next := q.state.NextUsed
	for _, u := range used {
		slot := q.cfg.Used + 4 + 8*guestmem.Addr(next%q.cfg.Size)
		if err := errors.Join(q.mem.WriteUint32(slot, uint32(u.Head)), q.mem.WriteUint32(slot+4, u.Written)); err != nil {
			return q.breakf("used ring: %w", err)
		}
		next++
	}
	if err := q.mem.StoreUint16(q.cfg.Used+2, next); err != nil {
		return q.breakf("used ring: %w", err)
	}
	q.state.NextUsed = next
	return nil
}

// NeedsInterrupt reports whether the driver wants to be signalled for what was pushed since the last call.
func (q *Queue) NeedsInterrupt() bool {
	if !q.eventIdx {
		flags, err := q.mem.LoadUint16(q.cfg.Avail)
		return err != nil || flags&availNoInterrupt == 0
	}
	event, err := q.mem.LoadUint16(q.cfg.Avail + 4 + 2*guestmem.Addr(q.cfg.Size))
	before, known := q.signalled, q.signalledKnown
	q.signalled, q.signalledKnown = q.state.NextUsed, true
	return err != nil || !known || crossed(event, q.state.NextUsed, before)
}

// crossed reports whether an index that went from before to now passed event (section 2.7.10, all modulo 2^16).
func crossed(event, now, before uint16) bool { return now-event-1 < now-before }

// AwaitMore asks the driver to notify when it adds a buffer to the ones taken so far, and reports whether there is one
// already: then no notification need come.
func (q *Queue) AwaitMore() (bool, error) {
	if err := q.NotifyAt(q.state.LastAvail); err != nil {
		return false, err
	}
	idx, err := q.AvailIdx()
	return idx != q.state.LastAvail, err
}

// NotifyAt asks the driver to notify when its index moves past idx.
func (q *Queue) NotifyAt(idx uint16) error {
	if q.broken != nil {
		return q.broken
	}
	if !q.eventIdx {
		return nil // notifications are never switched off
	}
	if err := q.mem.StoreUint16(q.cfg.Used+4+8*guestmem.Addr(q.cfg.Size), idx); err != nil {
		return q.breakf("avail_event: %w", err)
	}
	return nil
}

func (q *Queue) breakf(format string, args ...any) error {
	if q.broken == nil {
		q.broken = fmt.Errorf("%w: %w", ErrBroken, fmt.Errorf(format, args...))
	}
	return q.broken
}
