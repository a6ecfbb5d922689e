package virtio

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"torpor/vmm/virtio/mmio"
	"torpor/vmm/virtio/virtq"
)

// ErrNoStatistics means that a guest gives no statistics about its memory: its driver is not up, or cannot.
var ErrNoStatistics = errors.New("the guest gives no memory statistics")

// statNames are the statistics by tag (virtio 1.2, section 5.5.6.4). Memory is in bytes.
var statNames = [...]string{
	"swap_in", "swap_out", "major_faults", "minor_faults", "free_memory", "total_memory", "available_memory", "disk_caches",
	"hugetlb_allocations", "hugetlb_failures",
}

const (
	statsQueue = 2
	// statBytes is the size of a statistic: u16 tag, u64 value, packed. More than statMax of them are not looked at.
	statBytes = 10
	statMax   = 32
)

// statistics is the balloon's third queue. The driver puts one buffer of statistics into it and the device keeps that; giving
// it back asks for new ones (section 5.5.6.3). The buffer kept is part of a snapshot, or a restored guest would never be asked
// again. Balloon.mu guards it.
type statistics struct {
	queue *virtq.Queue // nil unless negotiated and active
	held  bool
	head  uint16 // of the buffer held

	values  [len(statNames)]uint64
	known   uint32 // bit per value
	taken   int64  // when, Unix ns; 0: never
	arrived chan struct{}
	chain   virtq.Chain
}

func (s *statistics) attach(negotiated bool, queues []*virtq.Queue) error {
	if !negotiated {
		if s.held {
			return errors.New("balloon state holds a buffer of a queue there is not")
		}
		return nil
	}
	if s.held && s.head >= queues[statsQueue].Size() {
		return fmt.Errorf("balloon state holds buffer %d of %d", s.head, queues[statsQueue].Size())
	}
	s.queue = queues[statsQueue]
	return nil
}

// detach forgets all; the driver starts over.
func (s *statistics) detach() { *s = statistics{arrived: s.arrived} }

// take reads the buffers that came. All but the newest are given back at once: a driver has no use for a second one. It looks
// at no more than the queue holds, so that a driver which adds them as fast as they are taken ends it too.
func (s *statistics) take(irq mmio.Interrupt, paused bool) {
	if s.queue == nil || paused {
		return
	}
	for range 2 * int(s.queue.Size()) {
		ok, err := s.queue.Pop(&s.chain)
		if err == nil && !ok {
			ok, err = s.queue.AwaitMore()
			if err == nil && !ok {
				return
			}
			continue
		}
		if err != nil {
			irq.NeedsReset()
			return
		}
		s.giveBack(irq)
		s.held, s.head = true, s.chain.Head
		s.read()
	}
}

// read takes the values from the newest buffer. One that cannot be read has none.
func (s *statistics) read() {
	var b [statBytes * statMax]byte
	raw := b[:min(s.chain.ReadLen(), uint64(len(b)))]
	if s.chain.ReadAt(raw, 0) != nil {
		return
	}
	s.known = 0
	for ; len(raw) >= statBytes; raw = raw[statBytes:] {
		if tag := binary.LittleEndian.Uint16(raw); int(tag) < len(s.values) {
			s.values[tag] = binary.LittleEndian.Uint64(raw[2:])
			s.known |= 1 << tag
		}
	}
	s.taken = time.Now().UnixNano()
	close(s.arrived)
	s.arrived = make(chan struct{})
}

// giveBack asks the driver for new statistics, unless it has been asked.
func (s *statistics) giveBack(irq mmio.Interrupt) {
	if !s.held {
		return
	}
	s.held = false
	if s.queue.Push(s.head, 0) != nil {
		irq.NeedsReset()
		return
	}
	if s.queue.NeedsInterrupt() {
		irq.Used()
	}
}

// BalloonStatus is what is known of a balloon.
type BalloonStatus struct {
	Target    uint64 // bytes it should hold
	Actual    uint64 // bytes it holds, as the driver says
	Discarded uint64 // bytes given to the host since the device was made, by inflating and by reporting
	Taken     time.Time
	Stats     map[string]uint64 // as of Taken, by the names of statNames; nil if there never were any
}

// Status never waits for the guest.
func (b *Balloon) Status() BalloonStatus {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := BalloonStatus{
		Target: uint64(b.target) * BalloonPage, Actual: uint64(b.actual.Load()) * BalloonPage, Discarded: b.discarded.Load(),
	}
	if b.stats.taken != 0 {
		s.Taken, s.Stats = time.Unix(0, b.stats.taken), map[string]uint64{}
		for tag, name := range statNames {
			if b.stats.known>>tag&1 != 0 {
				s.Stats[name] = b.stats.values[tag]
			}
		}
	}
	return s
}

// Refresh asks the guest for statistics and waits for them until ctx ends. The error is ErrNoStatistics or that of ctx.
func (b *Balloon) Refresh(ctx context.Context) error {
	b.mu.Lock()
	if b.stats.queue == nil || b.paused {
		b.mu.Unlock()
		return ErrNoStatistics
	}
	arrived := b.stats.arrived
	b.stats.giveBack(b.irq)
	b.mu.Unlock()
	select {
	case <-arrived:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w in time: %w", ErrNoStatistics, context.Cause(ctx))
	}
}

// balloonStateVersion is the version of a saved balloon: a savedBalloon, little-endian.
const balloonStateVersion = 1

type savedBalloon struct {
	Version uint32
	Target  uint32
	Actual  uint32
	Held    uint32 // 1: Head is the statistics buffer
	Head    uint32
	Known   uint32
	Taken   int64
	Values  [len(statNames)]uint64
}

// Save implements mmio.Device.
func (b *Balloon) Save() ([]byte, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := savedBalloon{
		Version: balloonStateVersion, Target: b.target, Actual: b.actual.Load(),
		Head: uint32(b.stats.head), Known: b.stats.known, Taken: b.stats.taken, Values: b.stats.values,
	}
	if b.stats.held {
		s.Held = 1
	}
	return binary.Append(nil, binary.LittleEndian, s)
}

// Load implements mmio.Device.
func (b *Balloon) Load(state []byte) error {
	var s savedBalloon
	r := bytes.NewReader(state)
	if err := binary.Read(r, binary.LittleEndian, &s); err != nil || r.Len() > 0 {
		return fmt.Errorf("balloon state has %d bytes", len(state))
	}
	if s.Version != balloonStateVersion {
		return fmt.Errorf("balloon state is of version %d, this program reads %d", s.Version, balloonStateVersion)
	}
	if s.Held > 1 || s.Head >= 1<<16 || s.Known>>len(statNames) != 0 || s.Taken < 0 {
		return errors.New("balloon state makes no sense")
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.target, b.paused = s.Target, true
	b.announce = true // it may have been set between the pause and the save
	b.actual.Store(s.Actual)
	b.stats.held, b.stats.head = s.Held == 1, uint16(s.Head)
	b.stats.known, b.stats.taken, b.stats.values = s.Known, s.Taken, s.Values
	return nil
}
