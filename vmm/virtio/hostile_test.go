package virtio

import (
	"bytes"
	"encoding/binary"
	"testing"

	"torpor/vmm/guestmem"
	"torpor/vmm/virtio/mmio"
)

// devices makes one of each.
func devices(t testing.TB) map[string]mmio.Device {
	return map[string]mmio.Device{
		"block":  NewBlock(openDisk(t, true), "", false, nil),
		"net":    drainedNet(t),
		"net rx": drainedNet(t),
		"rng":    NewRNG(),
		"vsock":  newVsock(t, tempSocket(t)),
	}
}

// devicesIn is devices, and those that need to know the memory they are in.
func devicesIn(t testing.TB, mem *guestmem.Memory) map[string]mmio.Device {
	all := devices(t)
	all["balloon"] = NewBalloon(mem, true)
	return all
}

// sharedMemory is guest memory that the test changes while the device looks at it, which the race detector must not see.
func sharedMemory(t testing.TB) *guestmem.Memory {
	t.Helper()
	b, err := guestmem.MapAnon(testMemory)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { guestmem.Unmap(b) })
	mem, err := guestmem.New([]guestmem.Region{{GPA: 0, Bytes: b}})
	if err != nil {
		t.Fatal(err)
	}
	return mem
}

// A driver that breaks the ring is told to reset the device, and after the reset all is well.
func TestBrokenQueueNeedsReset(t *testing.T) {
	for _, c := range []struct {
		name string
		harm func(d *driver, queue int)
	}{
		{"index far ahead", func(d *driver, queue int) {
			d.queues[queue].avail += d.queues[queue].size
			d.publish(queue, 0)
		}},
		{"head out of range", func(d *driver, queue int) { d.publish(queue, d.queues[queue].size) }},
		{"chain loops", func(d *driver, queue int) {
			d.writeDesc(queue, 0, buffer{0, 16, false}, 1, 1)
			d.writeDesc(queue, 1, buffer{0, 16, false}, 1, 0)
			d.publish(queue, 0)
		}},
		{"next out of range", func(d *driver, queue int) {
			d.writeDesc(queue, 0, buffer{0, 16, false}, 1, 60000)
			d.publish(queue, 0)
		}},
		{"readable after writable", func(d *driver, queue int) {
			d.writeDesc(queue, 0, buffer{0, 16, true}, 1|2, 1)
			d.writeDesc(queue, 1, buffer{0, 16, false}, 0, 0)
			d.publish(queue, 0)
		}},
		{"half an indirect descriptor", func(d *driver, queue int) {
			d.writeDesc(queue, 0, buffer{0, 24, false}, 4, 0)
			d.publish(queue, 0)
		}},
	} {
		mem := sharedMemory(t)
		for kind, dev := range devicesIn(t, mem) {
			t.Run(c.name+"/"+kind, func(t *testing.T) {
				d := newDriver(t, dev, mem)
				d.init()
				queue := 0
				if kind == "vsock" || kind == "net" {
					queue = 1 // from the guest
				}
				c.harm(d, queue)
				d.notify(queue)
				if !d.needsReset() {
					t.Fatal("the device does not ask for a reset")
				}
				// The interrupt follows the status.
				if !d.until(d.interrupted) {
					t.Error("without an interrupt")
				}
				// Still broken after a pause, and through a snapshot.
				d.check(d.tr.Pause())
				_, err := d.tr.Save()
				d.check(err)
				d.check(d.tr.Resume())
				if d.get(tStatus)&tNeedsReset == 0 {
					t.Error("forgot that it needs a reset")
				}
				d.queues, d.next = nil, guestmem.PageSize
				d.init()
				works(t, d, kind)
			})
		}
	}
}

// works does one request on a device.
func works(t *testing.T, d *driver, kind string) {
	t.Helper()
	switch kind {
	case "block":
		if status, _, _ := d.block(0, 0, nil, 512); status != 0 {
			t.Errorf("a read fails with status %d", status)
		}
	case "rng":
		d.add(0, d.out(8))
		d.notify(0)
		if _, n := d.wait(0); n != 8 {
			t.Errorf("%d random bytes", n)
		}
	case "balloon":
		at := guestmem.Addr(d.mem.Size()) - guestmem.PageSize
		d.check(d.mem.WriteAt([]byte{1}, at))
		d.add(0, d.in(binary.LittleEndian.AppendUint32(nil, uint32(at/BalloonPage))))
		d.notify(0)
		d.wait(0)
		if got := d.bytes(buffer{at: at, len: 1}); got[0] != 0 {
			t.Error("a ballooned page is still there")
		}
	case "net", "net rx":
		d.add(netTX, d.in(netFrame(100, 1)))
		d.notify(netTX)
		d.wait(netTX)
	case "vsock":
		d.add(vsockRX, d.out(64))
		h := vsockHeader{srcCID: testCID, dstCID: hostCID, srcPort: 1, dstPort: 2, typ: 1, op: vsockData}
		d.add(vsockTX, d.in(h.marshal()))
		d.notify(vsockTX)
		d.wait(vsockTX)
		if _, n := d.wait(vsockRX); n != vsockHeaderBytes {
			t.Errorf("a reply of %d bytes", n)
		}
	}
}

// Notifications in any number, of any queue, and resets at any moment do no harm.
func TestNotifyStormAndResetDuringIO(t *testing.T) {
	const size = 256 << 10
	mem := newMemory(t, size)
	for kind, dev := range devicesIn(t, mem) {
		t.Run(kind, func(t *testing.T) {
			d := newDriver(t, dev, mem)
			for range 50 {
				d.queues, d.next = nil, guestmem.PageSize
				d.init()
				for range 8 {
					for queue := range d.queues {
						d.add(queue, d.in(blockHeader(1, 0)), d.in(pattern(4096, 1)), d.out(1))
					}
					for _, n := range []uint32{0, 1, 2, 3, 1 << 31, 1<<32 - 1} {
						d.set(tNotify, n)
					}
				}
				d.set(tStatus, 0)
				// Memory is the driver's again: it stays as it makes it.
				d.check(d.mem.Zero(0, size))
				d.tr.Notify(0)
				if found := d.bytes(buffer{at: 0, len: size}); !bytes.Equal(found, make([]byte, size)) {
					t.Fatal("the device writes to guest memory after a reset")
				}
			}
			d.queues, d.next = nil, guestmem.PageSize
			d.init()
			works(t, d, kind)
		})
	}
}

// Packets that make no sense: the guest gets resets at most, the device goes on.
func TestVsockHostilePackets(t *testing.T) {
	g := newVsockGuest(t)
	c, h := g.connect(7)
	good := g.packet(h, vsockData)
	for name, bad := range map[string]func(*vsockHeader){
		"other source":      func(h *vsockHeader) { h.srcCID = 9 },
		"other destination": func(h *vsockHeader) { h.dstCID = 1 },
		"other type":        func(h *vsockHeader) { h.typ = 2 },
		"no connection":     func(h *vsockHeader) { h.srcPort++ },
	} {
		t.Run(name, func(t *testing.T) {
			p := good
			bad(&p)
			g.t = t
			g.sendRaw(p, nil)
			g.notify(vsockTX)
			g.wait(vsockTX)
			var got vsockHeader
			g.until(func() (ok bool) {
				head, _, ok := g.poll(vsockRX)
				if ok {
					bufs := g.rx[head]
					var all []byte
					for _, b := range bufs {
						all = append(all, g.bytes(b)...)
					}
					got = parseVsockHeader((*[vsockHeaderBytes]byte)(all))
					delete(g.rx, head)
					g.postRX(bufs...)
				}
				return ok
			})
			if got.op != vsockReset || got.dstPort != p.srcPort || got.typ != p.typ {
				t.Errorf("answer %+v", got)
			}
		})
	}
	g.t = t
	// Too short for a header, in every way.
	for _, n := range []int{0, 1, 43} {
		g.add(vsockTX, g.in(make([]byte, n)))
		g.notify(vsockTX)
		g.wait(vsockTX)
	}
	// Still there.
	g.reply(h, vsockData, []byte("hi"))
	if got := g.read(c, 2); got != "hi" {
		t.Fatalf("the host reads %q", got)
	}
	for name, bad := range map[string]func(*vsockHeader){
		"operation 0":              func(h *vsockHeader) { h.op = 0 },
		"operation 8":              func(h *vsockHeader) { h.op = 8 },
		"second response":          func(h *vsockHeader) { h.op = vsockResponse },
		"second request":           func(h *vsockHeader) { h.op = vsockRequest },
		"more than there is":       func(h *vsockHeader) { h.len = 100 },
		"more than there is, huge": func(h *vsockHeader) { h.len = 1<<32 - 1 },
	} {
		c, h := g.connect(7)
		p := g.packet(h, vsockData)
		bad(&p)
		g.send(p, nil)
		if got, _ := g.expect(vsockReset); got.srcPort != h.srcPort {
			t.Errorf("%s: answer %+v", name, got)
		}
		g.ended(c)
	}
	c.Close()
	g.expect(vsockShutdown)
	g.reply(h, vsockReset, nil)
	g.idle()
}

// A guest that provokes answers and takes none is stopped, and what is owed to it stays bounded.
func TestVsockAnswersAreBounded(t *testing.T) {
	g := &vsockGuest{driver: start(t, newVsock(t, tempSocket(t))), rx: map[uint16][]buffer{}}
	h := vsockHeader{srcCID: testCID, dstCID: hostCID, typ: 1, op: vsockData}
	taken := 0
	for i := range 4 * vsockMaxReplies {
		if len(g.queues[vsockTX].free) == 0 {
			break // the device no longer takes them
		}
		h.srcPort = uint32(i)
		g.add(vsockTX, g.in(h.marshal())) // memory of its own: it may be read late
		g.notify(vsockTX)
		for _, _, ok := g.poll(vsockTX); ok; _, _, ok = g.poll(vsockTX) {
			taken++
		}
	}
	if taken > 2*vsockMaxReplies {
		t.Fatalf("%d packets were taken", taken)
	}
	// Once the guest takes answers, all come, in order.
	for range 8 {
		g.postRX(g.out(64))
	}
	g.notify(vsockRX)
	for i := range h.srcPort {
		if got, _ := g.expect(vsockReset); got.dstPort != i {
			t.Fatalf("answer %d is for port %d", i, got.dstPort)
		}
	}
}

// FuzzDevices lets a driver do anything: registers, descriptors, memory. Nothing may panic or hang.
func FuzzDevices(f *testing.F) {
	f.Add([]byte{0, 0, 0, 0, 0, 0})
	f.Add([]byte{1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 1, 1, 1, 1, 1, 1})
	f.Add([]byte("\x00\x50\x00\x00\x00\x01\x01\x00\x10\xff\xff\xff\x02\x00\x20\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, script []byte) {
		mem := sharedMemory(t)
		for kind, dev := range devicesIn(t, mem) {
			d := newDriver(t, dev, mem)
			d.init()
			for queue := range d.queues {
				d.add(queue, d.in(blockHeader(1, 0)), d.in(pattern(512, 1)), d.out(64))
			}
			for op := script; len(op) >= 6; op = op[6:] {
				at, v := uint64(binary.LittleEndian.Uint16(op[1:])), binary.LittleEndian.Uint32(append(op[3:6:6], 0))
				switch op[0] % 4 {
				case 0:
					d.set(at%mmio.Size, v)
				case 1: // the queues lie from the first page on
					d.check(d.mem.WriteUint32(guestmem.PageSize+guestmem.Addr(at), v))
				case 2:
					for queue := range d.queues {
						d.publish(queue, uint16(v))
						d.set(tNotify, uint32(queue))
					}
				case 3:
					d.check(d.tr.Pause())
					if state, err := d.tr.Save(); err != nil {
						t.Fatalf("%s: save: %v", kind, err)
					} else if len(state) == 0 {
						t.Fatal("no state")
					}
					d.check(d.tr.Resume())
				}
			}
			d.tr.Close()
		}
	})
}
