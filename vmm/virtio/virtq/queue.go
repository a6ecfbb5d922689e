// Package virtq is the device's side of a split virtqueue (virtio 1.2, section 2.7) over guest memory.
//
//	descriptor table   16 bytes each       u64 addr, u32 len, u16 flags, u16 next              aligned to 16
//	available ring     driver to device    u16 flags, u16 idx, u16 ring[size], u16 used_event  aligned to 2
//	used ring          device to driver    u16 flags, u16 idx, {u32 id, u32 len}[size], u16 avail_event  aligned to 4
//
// Everything in a ring is written by the guest and may change while we look. A descriptor is read once, into private memory,
// and only the copy is believed; a chain is at most as long as the queue, so loops end; an indirect table is copied whole. A
// queue whose driver broke the rules answers ErrBroken from then on, and the device asks for a reset.
//
// Names and numbers are those of linux/virtio_ring.h (struct vring_desc, vring_avail, vring_used), whose layout the tests compare
// with the offsets here. A Queue is not safe for concurrent use: the device that owns it takes care of that. The package is a leaf.
package virtq

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// MaxSize is the largest queue the format has, in descriptors (section 2.7).
const MaxSize = 32768

// Flags of a descriptor (section 2.7.5; VRING_DESC_F_*).
const (
	descNext     = 1 // next is the next descriptor of the chain
	descWrite    = 2 // the device writes the bytes; else it reads them
	descIndirect = 4 // the bytes are a table with the rest of the chain
)

// availNoInterrupt is the flag of the available ring by which a driver without EVENT_IDX asks for silence (section 2.7.6;
// VRING_AVAIL_F_NO_INTERRUPT).
const availNoInterrupt = 1

// Offsets in struct vring_desc, and its size.
const (
	descAddr      = 0
	descLen       = 8
	descFlags     = 12
	descNextField = 14
	descBytes     = 16
)

// Offsets in struct vring_avail and struct vring_used, and the sizes of their elements. After the elements comes a u16: used_event
// and avail_event.
const (
	ringFlags = 0
	ringIdx   = 2
	ringElems = 4
	eventLen  = 2

	availElemBytes = 2
	usedElemBytes  = 8
)

// ErrBroken means that the driver broke the ring's rules; only a reset of the device mends it.
var ErrBroken = errors.New("virtqueue broken by the driver")

// Config is where a driver put a queue; addresses are guest-physical.
type Config struct {
	Size  uint16 // descriptors, a power of two
	Desc  uint64
	Avail uint64
	Used  uint64
}

// availElem returns where entry number n of the available ring is, n not reduced modulo the size.
func (c Config) availElem(n uint16) uint64 {
	return c.Avail + ringElems + availElemBytes*uint64(n%c.Size)
}

// usedElem returns where entry number n of the used ring is, n not reduced modulo the size.
func (c Config) usedElem(n uint16) uint64 { return c.Used + ringElems + usedElemBytes*uint64(n%c.Size) }

// usedEvent returns where the driver says after which used entry it wants an interrupt.
func (c Config) usedEvent() uint64 { return c.Avail + ringElems + availElemBytes*uint64(c.Size) }

// availEvent returns where the device says after which available entry it wants a notification.
func (c Config) availEvent() uint64 { return c.Used + ringElems + usedElemBytes*uint64(c.Size) }

// Features are the negotiated ones that change how a queue is read.
type Features struct {
	EventIdx bool // VIRTIO_F_EVENT_IDX: each side says when it wants to hear of the other's progress
	Indirect bool // VIRTIO_F_INDIRECT_DESC: a chain may lie in a table of its own
}

// State is the part of a queue that is not in guest memory; it goes into snapshots.
type State struct {
	LastAvail uint16 // the next entry of the available ring to take, not reduced modulo the size
	NextUsed  uint16 // used.idx
}

// Queue is one virtqueue.
type Queue struct {
	mem      Memory
	cfg      Config
	features Features
	state    State
	// signalled is NextUsed as it was when the driver's wish for an interrupt was last looked at, if known.
	signalled      uint16
	signalledKnown bool
	broken         error
	table          []byte          // an indirect table; nil before the first
	scratch        [descBytes]byte // a descriptor or a used element on its way: memory behind an interface wants a buffer of the heap
}

// New returns the queue at cfg, empty so far. It is an error if cfg is not what section 2.7 demands or not within RAM.
func New(mem Memory, cfg Config, features Features) (*Queue, error) {
	n := uint64(cfg.Size)
	if n == 0 || n > MaxSize || n&(n-1) != 0 {
		return nil, fmt.Errorf("virtqueue of %d descriptors", n)
	}
	for _, part := range []struct {
		name               string
		addr, align, bytes uint64
	}{
		{"descriptor table", cfg.Desc, 16, descBytes * n},
		{"available ring", cfg.Avail, 2, ringElems + availElemBytes*n + eventLen},
		{"used ring", cfg.Used, 4, ringElems + usedElemBytes*n + eventLen},
	} {
		if part.addr%part.align != 0 || !mem.Contains(part.addr, part.bytes) {
			return nil, fmt.Errorf("virtqueue: %s at %#x is misaligned or outside memory", part.name, part.addr)
		}
	}
	return &Queue{mem: mem, cfg: cfg, features: features}, nil
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
	elem := q.scratch[:availElemBytes] // no atomic load: the index was one, and it comes after its entries
	if err := q.mem.ReadAt(elem, q.cfg.availElem(q.state.LastAvail)); err != nil {
		return false, q.breakf("available ring: %w", err)
	}
	if err := q.walk(c, binary.LittleEndian.Uint16(elem)); err != nil {
		return false, err
	}
	q.state.LastAvail++
	return true, nil
}

// AvailIdx returns the driver's index: it moves when the driver makes buffers available.
func (q *Queue) AvailIdx() (uint16, error) {
	idx, err := q.mem.LoadUint16(q.cfg.Avail + ringIdx)
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
	elem := q.scratch[:usedElemBytes]
	for _, u := range used {
		binary.LittleEndian.PutUint32(elem, uint32(u.Head))
		binary.LittleEndian.PutUint32(elem[4:], u.Written)
		if err := q.mem.WriteAt(elem, q.cfg.usedElem(next)); err != nil {
			return q.breakf("used ring: %w", err)
		}
		next++
	}
	if err := q.mem.StoreUint16(q.cfg.Used+ringIdx, next); err != nil {
		return q.breakf("used ring: %w", err)
	}
	q.state.NextUsed = next
	return nil
}

// NeedsInterrupt reports whether the driver wants to be signalled for what was pushed since the last call.
func (q *Queue) NeedsInterrupt() bool {
	if !q.features.EventIdx {
		flags, err := q.mem.LoadUint16(q.cfg.Avail + ringFlags)
		return err != nil || flags&availNoInterrupt == 0
	}
	event, err := q.mem.LoadUint16(q.cfg.usedEvent())
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
	return q.More()
}

// More reports whether there is a buffer beyond the ones taken so far.
func (q *Queue) More() (bool, error) {
	idx, err := q.AvailIdx()
	return idx != q.state.LastAvail, err
}

// NotifyAt asks the driver to notify when its index moves past idx.
func (q *Queue) NotifyAt(idx uint16) error {
	if q.broken != nil {
		return q.broken
	}
	if !q.features.EventIdx {
		return nil // notifications are never switched off
	}
	if err := q.mem.StoreUint16(q.cfg.availEvent(), idx); err != nil {
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
