package virtio

import (
	"fmt"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"torpor/vmm/guestmem"
)

// Half-closed connections, each way, are waited for and not polled: a process whose peers say nothing is at rest.
func TestVsockHalfClosedIsAtRest(t *testing.T) {
	g := newVsockGuest(t)
	for range 8 {
		c, _ := g.connect(7)
		g.check(c.CloseWrite())
		g.expect(vsockShutdown)
		_, h := g.connect(7)
		bye := g.packet(h, vsockShutdown)
		bye.flags = vsockNoSend
		g.send(bye, nil)
	}
	var before, after unix.Rusage
	begin := time.Now()
	g.check(unix.Getrusage(unix.RUSAGE_SELF, &before))
	time.Sleep(200 * time.Millisecond) // at rest: there is nothing to wait for
	g.check(unix.Getrusage(unix.RUSAGE_SELF, &after))
	used := time.Duration(after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano())
	if share := float64(used) / float64(time.Since(begin)); share > 0.5 {
		t.Errorf("%.0f%% of a processor for connections on which nothing happens", 100*share)
	}
}

// Ports of the host's end are not used again in 50 restores: the guest may still hold a socket on one.
func TestVsockPortsAreNewAfterEveryRestore(t *testing.T) {
	g := newVsockGuest(t)
	seen := map[uint32]int{}
	for restore := range 50 {
		for range 4 {
			c, h := g.connect(7)
			if at, ok := seen[h.srcPort]; ok {
				t.Fatalf("port %d was used before restore %d and again after restore %d", h.srcPort, at, restore)
			}
			seen[h.srcPort] = restore
			c.Close()
			g.expect(vsockShutdown)
			g.reply(h, vsockReset, nil)
		}
		g.check(g.tr.Pause())
		g = g.restore()
		g.check(g.tr.Resume())
		g.postEvents(g.resets())
	}
}

// A pause in the middle of a close, by either side, at any step of it: afterwards the connection is gone on both sides.
func TestVsockPauseDuringClose(t *testing.T) {
	for _, restored := range []bool{false, true} {
		g := newVsockGuest(t)
		for i := range 24 {
			c, h := g.connectAmidResets(7)
			bye := g.packet(h, vsockShutdown)
			bye.flags = vsockNoSend | vsockNoReceive
			switch i % 3 {
			case 0:
				c.Close()
			case 1:
				g.sendRaw(bye, nil)
				g.notify(vsockTX)
			case 2:
				c.Close()
				g.sendRaw(bye, nil)
			}
			g.check(g.tr.Pause())
			if restored {
				g = g.restore()
			}
			g.check(g.tr.Resume())
			if i%3 > 0 {
				g.wait(vsockTX)
			}
			if restored {
				g.postEvents(g.resets()) // by which the guest forgets all
			} else if i%3 == 0 {
				g.expect(vsockShutdown)
				g.send(bye, nil)
			}
			g.idle()
		}
		// Nothing is left that a new connection could stumble over.
		c, _ := g.connectAmidResets(9)
		fmt.Fprint(c, "x")
		g.expect(vsockData)
	}
}

// connectAmidResets is connect when answers to an earlier connection may still come.
func (g *vsockGuest) connectAmidResets(port uint32) (*net.UnixConn, vsockHeader) {
	g.t.Helper()
	c := g.dial()
	fmt.Fprintf(c, "CONNECT %d\n", port)
	h, _ := g.recv()
	for h.op == vsockReset || h.op == vsockShutdown {
		h, _ = g.recv()
	}
	if h.op != vsockRequest {
		g.t.Fatalf("operation %d instead of a request", h.op)
	}
	g.reply(h, vsockResponse, nil)
	g.read(c, len(fmt.Sprintf("OK %d\n", h.srcPort)))
	return c, h
}

// A guest that rewrites a packet while the device reads it gets what it wrote at one moment, never a mixture that passes a
// check as one thing and acts as another: the length that was checked is the length that is used.
func TestVsockHeaderIsReadOnce(t *testing.T) {
	mem := sharedMemory(t)
	path := tempSocket(t)
	dev := newVsock(t, path)
	g := &vsockGuest{driver: newDriver(t, dev, mem), dev: dev, path: path, rx: map[uint16][]buffer{}, alloc: 64 << 10}
	g.init()
	for range 12 {
		g.postRX(g.out(44 + 4096))
	}
	g.notify(vsockRX)
	h := vsockHeader{srcCID: testCID, dstCID: hostCID, srcPort: 7, dstPort: 9, typ: vsockStream, op: vsockData, len: 16, bufAlloc: 1 << 16}
	evil := h
	evil.len, evil.op, evil.typ, evil.dstCID = 1<<32-1, 99, 77, 1<<63
	packet := g.in(append(h.marshal(), make([]byte, 16)...))
	done := make(chan struct{})
	flipped := make(chan struct{})
	go func() {
		defer close(flipped)
		for i := 0; ; i++ {
			select {
			case <-done:
				return
			default:
			}
			raw := h.marshal()
			if i%2 == 0 {
				raw = evil.marshal()
			}
			_ = mem.WriteAt(raw, packet.at)
		}
	}()
	for range 2000 {
		g.add(vsockTX, packet)
		g.notify(vsockTX)
		g.wait(vsockTX)
		for head, n, ok := g.poll(vsockRX); ok; head, n, ok = g.poll(vsockRX) {
			if n < vsockHeaderBytes || n > vsockHeaderBytes+4096 {
				t.Fatalf("an answer of %d bytes", n)
			}
			bufs := g.rx[head]
			delete(g.rx, head)
			g.postRX(bufs...)
			g.notify(vsockRX)
		}
	}
	close(done)
	<-flipped
	if g.get(tStatus)&tNeedsReset != 0 {
		t.Error("the device gave up")
	}
	var canary [64]byte
	if err := mem.ReadAt(canary[:], guestmem.Addr(mem.Size()-64)); err != nil || canary != [64]byte{} {
		t.Error("memory that no buffer covers was written")
	}
}
