package virtio

import (
	"encoding/binary"
	"slices"
	"sync"
	"sync/atomic"

	"torpor/vmm/guestmem"
	"torpor/vmm/virtio/mmio"
	"torpor/vmm/virtio/virtq"
)

// Features of a balloon (virtio 1.2, section 5.5.3). Without MUST_TELL_HOST a driver may use a page before it says so, which
// costs nothing here: a touched page is simply there again. Without PAGE_POISON pages come back with undefined contents.
const (
	balloonStatsVQ      = 1 << 1
	balloonDeflateOnOOM = 1 << 2
	balloonReporting    = 1 << 5
)

const (
	// BalloonPage is what the device counts in, in bytes.
	BalloonPage = 4096

	// balloonConfigBytes: num_pages, then actual (section 5.5.4).
	balloonConfigBytes = 8
	// balloonQueueSize must hold the 32 ranges that Linux reports at a time.
	balloonQueueSize = 64
	// balloonBatch is how many page numbers are sorted together, balloonMaxPages how many of one request are taken: Linux gives
	// 256. The rest of a longer request stays with the guest, which costs the host memory and the guest nothing.
	balloonBatch    = 1024
	balloonMaxPages = 4 * balloonBatch
)

// Discarder is the guest's memory as a balloon sees it. *guestmem.Memory is one and says what Discard does.
type Discarder interface {
	Discard(a guestmem.Addr, n uint64) (uint64, error)
}

// Balloon takes memory from the guest and gives it to the host (virtio 1.2, section 5.5): pages the driver puts into it until
// it holds the target (inflate), and pages the guest's kernel has free anyway (free page reporting). The guest may give any
// page it likes; it only loses its own.
//
// Queues are numbered without gaps, as Linux and QEMU do, not as in the table of section 5.5.2: inflate, deflate, statistics
// if negotiated, reporting if negotiated.
type Balloon struct {
	mem       Discarder
	reporting bool

	servers   []*server // inflate, deflate, reporting; nil unless active
	discarded atomic.Uint64
	actual    atomic.Uint32 // pages the driver says it holds

	// mu guards all below.
	mu       sync.Mutex
	irq      mmio.Interrupt // nil unless active
	target   uint32         // pages
	announce bool           // the driver must be told of the target when it runs
	paused   bool
	stats    statistics
}

var (
	_ mmio.Device    = (*Balloon)(nil)
	_ mmio.Selective = (*Balloon)(nil)
)

// NewBalloon returns an empty balloon in mem. reporting offers free page reporting.
func NewBalloon(mem Discarder, reporting bool) *Balloon {
	return &Balloon{mem: mem, reporting: reporting, stats: statistics{arrived: make(chan struct{})}}
}

// SetTarget asks the driver to make the balloon hold so many bytes, rounded down to whole pages. It does not wait for that;
// a guest that runs out of memory takes some back. A snapshot keeps the target once there is a driver.
func (b *Balloon) SetTarget(bytes uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.target = uint32(min(bytes/BalloonPage, 1<<32-1))
	b.announce = true
	b.announceLocked()
}

func (b *Balloon) announceLocked() {
	if b.announce && b.irq != nil && !b.paused {
		b.announce = false
		b.irq.Config()
	}
}

// ID implements mmio.Device.
func (b *Balloon) ID() uint32 { return idBalloon }

// Features implements mmio.Device.
func (b *Balloon) Features() uint64 {
	f := uint64(balloonStatsVQ | balloonDeflateOnOOM)
	if b.reporting {
		f |= balloonReporting
	}
	return f
}

// QueueSizes implements mmio.Device.
func (b *Balloon) QueueSizes() []uint16 {
	return slices.Repeat([]uint16{balloonQueueSize}, b.QueuesWith(b.Features()))
}

// QueuesWith implements mmio.Selective.
func (b *Balloon) QueuesWith(features uint64) int {
	n := 2
	for _, f := range []uint64{balloonStatsVQ, balloonReporting} {
		if features&f != 0 {
			n++
		}
	}
	return n
}

// ReadConfig implements mmio.Device.
func (b *Balloon) ReadConfig(off uint64, p []byte) {
	b.mu.Lock()
	config := binary.LittleEndian.AppendUint32(nil, b.target)
	b.mu.Unlock()
	config = binary.LittleEndian.AppendUint32(config, b.actual.Load())
	if off < balloonConfigBytes {
		copy(p, config[off:])
	}
}

// WriteConfig implements mmio.Device: the driver says how many pages it holds, and nothing checks that.
func (b *Balloon) WriteConfig(off uint64, p []byte) {
	if off == 4 && len(p) == 4 {
		b.actual.Store(binary.LittleEndian.Uint32(p))
	}
}

// Activate implements mmio.Device.
func (b *Balloon) Activate(features uint64, queues []*virtq.Queue, irq mmio.Interrupt) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.stats.attach(features&balloonStatsVQ != 0, queues); err != nil {
		return err
	}
	b.irq = irq
	b.servers = []*server{
		startServer(queues[0], irq, b.paused, 1, 4*balloonBatch, b.inflate),
		startServer(queues[1], irq, b.paused, 1, 0, deflate),
	}
	if features&balloonReporting != 0 {
		b.servers = append(b.servers, startServer(queues[len(queues)-1], irq, b.paused, 1, 0, b.report))
	}
	b.stats.take(irq, b.paused)
	b.announceLocked()
	return nil
}

// inflate gives the pages of a request to the host.
func (b *Balloon) inflate(c *virtq.Chain, buf []byte) uint32 {
	pages := make([]uint32, 0, balloonBatch)
	left := min(c.ReadLen()/4, balloonMaxPages)
	for off := uint64(0); left > 0; {
		part := buf[:4*min(left, balloonBatch)]
		if c.ReadAt(part, off) != nil {
			return 0
		}
		pages = pages[:0]
		for i := 0; i < len(part); i += 4 {
			pages = append(pages, binary.LittleEndian.Uint32(part[i:]))
		}
		pageRuns(pages, func(first, n uint64) { b.discard(guestmem.Addr(first*BalloonPage), n*BalloonPage) })
		off += uint64(len(part))
		left -= uint64(len(part)) / 4
	}
	return 0
}

// pageRuns sorts pages and calls f for every run of neighbours: drivers give most pages in runs, forwards or backwards.
func pageRuns(pages []uint32, f func(first, n uint64)) {
	slices.Sort(pages)
	for len(pages) > 0 {
		first, n := uint64(pages[0]), uint64(1)
		i := 1
		for ; i < len(pages) && uint64(pages[i]) <= first+n; i++ {
			n = uint64(pages[i]) - first + 1
		}
		f(first, n)
		pages = pages[i:]
	}
}

// discard ignores what cannot be discarded: that costs the host memory and nobody else anything.
func (b *Balloon) discard(at guestmem.Addr, n uint64) {
	done, _ := b.mem.Discard(at, n)
	b.discarded.Add(done)
}

// deflate has nothing to do: a page comes back when it is touched.
func deflate(*virtq.Chain, []byte) uint32 { return 0 }

// report discards the ranges of a request. The driver uses them again after the answer, and expects nothing in them.
func (b *Balloon) report(c *virtq.Chain, _ []byte) uint32 {
	c.Writable(func(addr uint64, n uint32) { b.discard(guestmem.Addr(addr), uint64(n)) })
	return 0
}

// Notify implements mmio.Device.
func (b *Balloon) Notify(queue int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.stats.queue != nil && queue >= statsQueue {
		if queue == statsQueue {
			b.stats.take(b.irq, b.paused)
			return
		}
		queue--
	}
	if queue < len(b.servers) {
		b.servers[queue].kick()
	}
}

// Reset implements mmio.Device. The target stays: it is the host's.
func (b *Balloon) Reset() {
	for _, s := range b.servers {
		s.stop()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.servers, b.irq, b.paused, b.announce = nil, nil, false, false
	b.actual.Store(0)
	b.stats.detach()
}

// Pause implements mmio.Device.
func (b *Balloon) Pause() error {
	for _, s := range b.servers {
		s.pause()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.paused = true
	return nil
}

// Resume implements mmio.Device.
func (b *Balloon) Resume() error {
	for _, s := range b.servers {
		s.resume()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.paused = false
	b.announceLocked()
	return nil
}
