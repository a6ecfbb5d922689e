package virtio

import (
	"encoding/binary"
	"errors"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"torpor/vmm/guestmem"
	"torpor/vmm/virtio/mmio"
)

// patience ends a test that hangs; nothing that works comes near it.
const patience = time.Minute

const testMemory = 4 << 20

// The register file, as section 4.2.2 has it; the tests do not trust the constants they test.
const (
	tDeviceFeatures, tDeviceSelect = 0x10, 0x14
	tDriverFeatures, tDriverSelect = 0x20, 0x24
	tQueueSelect, tQueueMax        = 0x30, 0x34
	tQueueNum, tQueueReady         = 0x38, 0x44
	tNotify                        = 0x50
	tInterrupt, tAck, tStatus      = 0x60, 0x64, 0x70
	tDesc, tAvail, tUsed           = 0x80, 0x90, 0xa0
	tConfig                        = 0x100
	tNeedsReset                    = 64
	tEventIdx                      = 1 << 29
)

// driver is a guest's driver for one device: it lays out queues in guest memory and reaches the device through registers only.
// It is not safe for concurrent use.
type driver struct {
	t      testing.TB
	mem    *guestmem.Memory
	tr     *mmio.Transport
	queues []*driverQueue
	next   guestmem.Addr // free guest memory from here on
	refuse uint64        // features not to negotiate

	rings    map[int]chan struct{} // of the queues that are served directly
	notified int

	mu   sync.Mutex
	cond *sync.Cond // an interrupt came
	irqs int
}

type driverQueue struct {
	size, avail, seen uint16
	free              []uint16
	desc, ring, used  guestmem.Addr
	chains            map[uint16][]uint16 // descriptors by head
}

type buffer struct {
	at       guestmem.Addr
	len      uint32
	writable bool
}

func newMemory(t testing.TB, size int) *guestmem.Memory {
	t.Helper()
	mem, err := guestmem.New([]guestmem.Region{{GPA: 0, Bytes: make([]byte, size)}})
	if err != nil {
		t.Fatal(err)
	}
	return mem
}

// newDriver attaches a driver to dev without talking to it.
func newDriver(t testing.TB, dev mmio.Device, mem *guestmem.Memory) *driver {
	d := &driver{t: t, mem: mem, next: guestmem.PageSize}
	d.cond = sync.NewCond(&d.mu)
	d.tr = mmio.NewTransport(dev, mem, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.irqs++
		d.cond.Broadcast()
	})
	t.Cleanup(d.tr.Close)
	d.serveDirectly(dev)
	return d
}

// serveDirectly does what a machine does for the queues of a mmio.Direct device.
func (d *driver) serveDirectly(dev mmio.Device) {
	if _, ok := dev.(mmio.Direct); !ok {
		return
	}
	d.rings = map[int]chan struct{}{}
	for queue := range dev.QueueSizes() {
		ring, gone := make(chan struct{}, 1), make(chan struct{})
		d.rings[queue] = ring
		go func() {
			defer close(gone)
			for range ring {
				d.tr.Serve(queue)
			}
		}()
		d.t.Cleanup(func() {
			close(ring)
			<-gone
		})
	}
}

// start is newDriver and the whole initialisation.
func start(t testing.TB, dev mmio.Device) *driver {
	d := newDriver(t, dev, newMemory(t, testMemory))
	d.init()
	return d
}

func (d *driver) get(off uint64) uint32 {
	var b [4]byte
	d.tr.Read(off, b[:])
	return binary.LittleEndian.Uint32(b[:])
}

func (d *driver) set(off uint64, v uint32) { d.tr.Write(off, binary.LittleEndian.AppendUint32(nil, v)) }

// init takes the device through section 3.1.1 with every feature it offers.
func (d *driver) init() {
	d.t.Helper()
	d.negotiate()
	for i := range 8 {
		d.set(tQueueSelect, uint32(i))
		if d.get(tQueueMax) == 0 {
			break
		}
		d.addQueue(uint16(d.get(tQueueMax)))
	}
	d.set(tStatus, d.get(tStatus)|4)
	if s := d.get(tStatus); s != 15 {
		d.t.Fatalf("status %#x after initialisation", s)
	}
}

func (d *driver) negotiate() {
	d.set(tStatus, 0)
	d.set(tStatus, 1)
	d.set(tStatus, 1|2)
	for half := range uint32(2) {
		d.set(tDeviceSelect, half)
		d.set(tDriverSelect, half)
		d.set(tDriverFeatures, d.get(tDeviceFeatures)&^uint32(d.refuse>>(32*half)))
	}
	d.set(tStatus, 1|2|8)
}

// addQueue sets up the selected queue.
func (d *driver) addQueue(size uint16) *driverQueue {
	q := &driverQueue{size: size, chains: map[uint16][]uint16{}}
	q.desc = d.alloc(16 * uint64(size))
	q.ring = d.alloc(6 + 2*uint64(size))
	q.used = d.alloc(6 + 8*uint64(size))
	for i := range size {
		q.free = append(q.free, i)
	}
	d.set(tQueueNum, uint32(size))
	for at, addr := range map[uint64]guestmem.Addr{tDesc: q.desc, tAvail: q.ring, tUsed: q.used} {
		d.set(at, uint32(addr))
		d.set(at+4, uint32(uint64(addr)>>32))
	}
	d.set(tQueueReady, 1)
	d.queues = append(d.queues, q)
	return q
}

// alloc takes n bytes of guest memory, zeroed, for good.
func (d *driver) alloc(n uint64) guestmem.Addr {
	d.t.Helper()
	at := d.next
	d.next += guestmem.Addr((n + 63) / 64 * 64)
	if err := d.mem.Zero(at, n); err != nil {
		d.t.Fatalf("the test needs more guest memory: %v", err)
	}
	return at
}

// in allocates a buffer the device reads.
func (d *driver) in(p []byte) buffer {
	at := d.alloc(uint64(len(p)))
	d.check(d.mem.WriteAt(p, at))
	return buffer{at, uint32(len(p)), false}
}

// out allocates a buffer the device writes.
func (d *driver) out(n uint32) buffer { return buffer{d.alloc(uint64(n)), n, true} }

func (d *driver) bytes(b buffer) []byte {
	p := make([]byte, b.len)
	d.check(d.mem.ReadAt(p, b.at))
	return p
}

func (d *driver) check(err error) {
	d.t.Helper()
	if err != nil {
		d.t.Fatal(err)
	}
}

// add makes a chain available, without a notification, and returns its head.
func (d *driver) add(queue int, bufs ...buffer) uint16 {
	d.t.Helper()
	q := d.queues[queue]
	if len(q.free) < len(bufs) {
		d.t.Fatal("the test has no descriptor left")
	}
	ids := q.free[:len(bufs):len(bufs)]
	q.free = q.free[len(bufs):]
	for i, b := range bufs {
		var flags, next uint16
		if b.writable {
			flags |= 2
		}
		if i+1 < len(bufs) {
			flags |= 1
			next = ids[i+1]
		}
		d.writeDesc(queue, ids[i], b, flags, next)
	}
	q.chains[ids[0]] = ids
	d.publish(queue, ids[0])
	return ids[0]
}

func (d *driver) writeDesc(queue int, id uint16, b buffer, flags, next uint16) {
	raw := binary.LittleEndian.AppendUint64(nil, uint64(b.at))
	raw = binary.LittleEndian.AppendUint32(raw, b.len)
	raw = binary.LittleEndian.AppendUint16(raw, flags)
	raw = binary.LittleEndian.AppendUint16(raw, next)
	d.check(d.mem.WriteAt(raw, d.queues[queue].desc+16*guestmem.Addr(id)))
}

// publish puts head into the available ring.
func (d *driver) publish(queue int, head uint16) {
	q := d.queues[queue]
	d.check(d.mem.WriteUint16(q.ring+4+2*guestmem.Addr(q.avail%q.size), head))
	q.avail++
	d.check(d.mem.StoreUint16(q.ring+2, q.avail))
}

// notify goes by an ioeventfd, as it were, where that is another way, and now and then by the register all the same.
func (d *driver) notify(queue int) {
	d.notified++
	ring := d.rings[queue]
	if ring == nil || d.notified%3 == 0 {
		d.set(tNotify, uint32(queue))
		return
	}
	select {
	case ring <- struct{}{}:
	default:
	}
}

// poll takes the next used chain.
func (d *driver) poll(queue int) (head uint16, n uint32, ok bool) {
	q := d.queues[queue]
	idx, err := d.mem.LoadUint16(q.used + 2)
	d.check(err)
	if idx == q.seen {
		return 0, 0, false
	}
	at := q.used + 4 + 8*guestmem.Addr(q.seen%q.size)
	id, err1 := d.mem.ReadUint32(at)
	n, err2 := d.mem.ReadUint32(at + 4)
	d.check(errors.Join(err1, err2))
	q.seen++
	// Ask for an interrupt with the next one: used_event is behind the available ring.
	d.check(d.mem.StoreUint16(q.ring+4+2*guestmem.Addr(q.size), q.seen))
	q.free = append(q.free, q.chains[uint16(id)]...)
	delete(q.chains, uint16(id))
	return uint16(id), n, true
}

// wait takes the next used chain, sleeping on interrupts.
func (d *driver) wait(queue int) (head uint16, n uint32) {
	d.t.Helper()
	ok := d.until(func() bool {
		var got bool
		head, n, got = d.poll(queue)
		return got
	})
	if !ok {
		d.t.Fatalf("queue %d: nothing came back", queue)
	}
	return head, n
}

// until reports whether cond came true, looking after each interrupt.
func (d *driver) until(cond func() bool) bool {
	deadline := time.AfterFunc(patience, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.irqs = -1 << 30
		d.cond.Broadcast()
	})
	defer deadline.Stop()
	for {
		d.mu.Lock()
		before := d.irqs
		d.mu.Unlock()
		d.set(tAck, d.get(tInterrupt))
		if cond() {
			return true
		}
		d.mu.Lock()
		for d.irqs == before {
			d.cond.Wait()
		}
		late := d.irqs < 0
		d.mu.Unlock()
		if late {
			return false
		}
	}
}

// interrupted reports whether there ever was an interrupt.
func (d *driver) interrupted() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.irqs != 0
}

// needsReset waits until the device asks for a reset.
func (d *driver) needsReset() bool {
	return d.until(func() bool { return d.get(tStatus)&tNeedsReset != 0 })
}

// move takes the driver over to a fresh device that is loaded with what the old one saved.
func (d *driver) move(dev mmio.Device) *driver {
	d.t.Helper()
	state, err := d.tr.Save()
	d.check(err)
	n := newDriver(d.t, dev, d.mem)
	n.queues, n.next = d.queues, d.next
	d.check(n.tr.Load(state))
	return n
}

func tempSocket(t testing.TB) string {
	t.Helper()
	return filepath.Join(t.TempDir(), "v")
}

func pattern(n int, seed byte) []byte {
	p := make([]byte, n)
	x := uint32(seed) + 1
	for i := range p {
		x = x*1664525 + 1013904223
		p[i] = byte(x >> 24)
	}
	return p
}
