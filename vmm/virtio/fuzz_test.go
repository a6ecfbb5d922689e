package virtio

import (
	"testing"

	"torpor/vmm/virtio/mmio"
	"torpor/vmm/virtio/virtq"
)

// FuzzVsockTX sends packets of the guest's making, scattered over descriptors at its whim, to a device with a connection each
// way. Whatever it sends: nothing panics, what the host reads is what was sent for it, and the device stays within its bounds.
func FuzzVsockTX(f *testing.F) {
	packet := func(change func(*vsockHeader), payload string) []byte {
		h := vsockHeader{srcCID: testCID, dstCID: hostCID, srcPort: 7, dstPort: vsockFirstPort, typ: vsockStream, op: vsockData, len: uint32(len(payload))}
		change(&h)
		return append(h.marshal(), payload...)
	}
	f.Add(packet(func(*vsockHeader) {}, "hello"), byte(44))
	f.Add(packet(func(h *vsockHeader) { h.op, h.flags = vsockShutdown, 3 }, ""), byte(10))
	f.Add(packet(func(h *vsockHeader) { h.op, h.dstPort = vsockRequest, 1024 }, ""), byte(0))
	f.Add(packet(func(h *vsockHeader) { h.op, h.bufAlloc, h.fwdCnt = vsockCreditUpdate, 1<<32-1, 1<<31 }, ""), byte(1))
	f.Add(packet(func(h *vsockHeader) { h.op = vsockResponse }, ""), byte(43))
	f.Add(packet(func(h *vsockHeader) { h.len = 1<<32 - 1 }, "short"), byte(45))
	f.Add(packet(func(h *vsockHeader) { h.srcCID, h.typ = 99, 2 }, "x"), byte(5))
	f.Fuzz(func(t *testing.T, raw []byte, cut byte) {
		g := newVsockGuest(t)
		g.connect(7)
		raw = raw[:min(len(raw), 4096)]
		for range 3 {
			at := min(int(cut), len(raw))
			g.add(vsockTX, g.in(raw[:at]), g.in(raw[at:]))
			g.add(vsockTX, g.in(raw))
		}
		g.notify(vsockTX)
		g.check(g.tr.Pause())
		g.dev.mu.Lock()
		if n := len(g.dev.all); n > vsockMaxConns {
			t.Errorf("%d connections", n)
		}
		g.dev.mu.Unlock()
		state, err := g.tr.Save()
		g.check(err)
		g.check(newDriver(t, newVsock(t, tempSocket(t)), g.mem).tr.Load(state))
		g.check(g.tr.Resume())
		g.tr.Close()
	})
}

// FuzzDeviceLoad takes any bytes for the state of each device: it is refused, or the device works with it and saves the same.
func FuzzDeviceLoad(f *testing.F) {
	f.Add([]byte{})
	f.Add(make([]byte, 112))
	mem := newMemory(f, testMemory)
	for _, dev := range devicesIn(f, mem) {
		d := newDriver(f, dev, mem)
		d.init()
		d.check(d.tr.Pause())
		state, err := dev.Save()
		d.check(err)
		f.Add(state)
		d.tr.Close()
	}
	f.Fuzz(func(t *testing.T, state []byte) {
		mem := newMemory(t, testMemory)
		for kind, dev := range devicesIn(t, mem) {
			if dev.Load(state) != nil {
				continue
			}
			activateLoaded(t, kind, dev, newDriver(t, dev, mem))
		}
	})
}

// activateLoaded goes on with a loaded device as the transport does.
func activateLoaded(t *testing.T, kind string, dev mmio.Device, d *driver) {
	t.Helper()
	var queues []*virtq.Queue
	for _, size := range dev.QueueSizes() {
		n := uint64(size)
		q, err := virtq.New(d.mem, virtq.Config{Size: size, Desc: d.alloc(16 * n), Avail: d.alloc(6 + 2*n), Used: d.alloc(6 + 8*n)}, virtq.Features{EventIdx: true})
		d.check(err)
		queues = append(queues, q)
	}
	if dev.Activate(dev.Features()|mmio.FeatureVersion1|mmio.FeatureEventIdx, queues, d.tr.Interrupt()) != nil {
		return
	}
	defer dev.Reset()
	if _, err := dev.Save(); err != nil {
		t.Errorf("%s: %v", kind, err)
	}
	d.check(dev.Resume())
	for i := range queues {
		dev.Notify(i)
	}
	d.check(dev.Pause())
}
