package virtio

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"testing"
	"time"
)

// restore moves the guest over to a fresh device, as a restore does.
func (g *vsockGuest) restore() *vsockGuest {
	g.t.Helper()
	path := tempSocket(g.t)
	dev := newVsock(g.t, path)
	return &vsockGuest{driver: g.move(dev), dev: dev, path: path, rx: g.rx, alloc: g.alloc}
}

// resets takes the events that are there and returns how many are a TRANSPORT_RESET.
func (g *vsockGuest) resets() int {
	g.t.Helper()
	n := 0
	for {
		_, size, ok := g.poll(vsockEvent)
		if !ok {
			return n
		}
		if size != 4 {
			g.t.Fatalf("an event of %d bytes", size)
		}
		n++
	}
}

// silent fails if the guest was sent a packet.
func (g *vsockGuest) silent() {
	g.t.Helper()
	// The device has done all it will when a notification has been served: its worker is waited for by a pause.
	g.dev.serve()
	if h, _, ok := g.tryRecv(); ok {
		g.t.Fatalf("operation %d before the guest forgot its connections", h.op)
	}
}

func TestVsockRestoreHoldsConnectionsUntilTheGuestForgot(t *testing.T) {
	g := newVsockGuest(t)
	ports := map[uint32]bool{}
	for cycle := range 5 {
		old, h := g.connect(7)
		if ports[h.srcPort] {
			t.Fatal("a host port is used again after a restore")
		}
		ports[h.srcPort] = true
		g.check(g.tr.Pause())
		g = g.restore()
		g.ended(old)
		early := g.dial() // before the guest runs
		fmt.Fprint(early, "CONNECT 8\n")
		g.check(g.tr.Resume())
		if n := g.resets(); n != 1 {
			t.Fatalf("cycle %d: %d transport resets", cycle, n)
		}
		if g.get(tInterrupt)&1 == 0 {
			t.Fatal("the guest is not interrupted for it")
		}
		// What the guest sends on the old connection, before it read the event, is answered after it.
		g.reply(h, vsockData, []byte("stale"))
		g.silent()
		g.postEvents(1)
		if got, _ := g.expect(vsockReset); got.srcPort != h.srcPort {
			t.Fatalf("reset %+v", got)
		}
		got, _ := g.expect(vsockRequest)
		g.reply(got, vsockResponse, nil)
		want := fmt.Sprintf("OK %d\n", got.srcPort)
		if line := g.read(early, len(want)); line != want {
			t.Fatalf("the host reads %q", line)
		}
		fmt.Fprint(early, "x")
		g.expect(vsockData)
	}
}

func TestVsockRestoreWithoutAnEventBuffer(t *testing.T) {
	g := newVsockGuest(t)
	for len(g.queues[vsockEvent].chains) > 0 { // use them up
		g.check(g.tr.Pause())
		g = g.restore()
		g.check(g.tr.Resume())
		g.resets()
		if len(g.queues[vsockEvent].chains) == 0 {
			break
		}
		g.dev.mu.Lock()
		g.dev.reset = transportReset{} // as if the guest had acknowledged without a new buffer
		g.dev.mu.Unlock()
	}
	g.dev.mu.Lock()
	g.dev.reset = transportReset{}
	g.dev.mu.Unlock()
	g.check(g.tr.Pause())
	g = g.restore()
	g.check(g.tr.Resume())
	c := g.dial()
	fmt.Fprint(c, "CONNECT 8\n")
	g.silent()
	if g.resets() != 0 {
		t.Fatal("an event out of nowhere")
	}
	g.postEvents(2) // the event comes as soon as it can
	g.wait(vsockEvent)
	g.silent()
	g.postEvents(1)
	g.expect(vsockRequest)
}

// A pause alone ends nothing, and nothing is lost in it.
func TestVsockBarePause(t *testing.T) {
	g := newVsockGuest(t)
	c, h := g.connect(7)
	for range 5 {
		g.check(g.tr.Pause())
		g.sendRaw(g.packet(h, vsockData), []byte("from the guest"))
		g.notify(vsockTX) // lost: nobody listens
		fmt.Fprint(c, "from the host")
		g.silent()
		g.check(g.tr.Resume())
		if g.resets() != 0 {
			t.Fatal("a transport reset without a snapshot")
		}
		g.wait(vsockTX)
		if _, p := g.expect(vsockData); string(p) != "from the host" {
			t.Fatalf("the guest reads %q", p)
		}
		if got := g.read(c, 14); got != "from the guest" {
			t.Fatalf("the host reads %q", got)
		}
	}
}

// A snapshot that came to nothing: the machine goes on in place, where the guest finds the event as after a restore.
func TestVsockResumeInPlaceAfterSave(t *testing.T) {
	g := newVsockGuest(t)
	c, _ := g.connect(7)
	g.check(g.tr.Pause())
	for range 3 { // each try overwrites the last
		_, err := g.tr.Save()
		g.check(err)
	}
	g.ended(c)
	g.check(g.tr.Resume())
	if n := g.resets(); n != 1 {
		t.Fatalf("%d transport resets", n)
	}
	next := g.dial()
	fmt.Fprint(next, "CONNECT 8\n")
	g.silent()
	g.postEvents(1)
	g.expect(vsockRequest)

	// And a bare pause after that holds nothing back.
	g.check(g.tr.Pause())
	g.check(g.tr.Resume())
	g.connect(9)
}

// A snapshot amid traffic: bytes of the old connections are dropped on both sides, new ones work at once.
func TestVsockSnapshotUnderTraffic(t *testing.T) {
	g := newVsockGuest(t)
	for cycle := range 20 {
		c, h := g.connect(7)
		flood := make(chan struct{})
		go func() {
			defer close(flood)
			for p := make([]byte, 1000); ; {
				if _, err := c.Write(p); err != nil {
					return
				}
			}
		}()
		go io.Copy(io.Discard, c)
		for range cycle {
			_, p := g.recv()
			g.forwarded += uint32(len(p))
			g.reply(h, vsockData, make([]byte, 100))
		}
		g.check(g.tr.Pause())
		g.sendRaw(g.packet(h, vsockData), make([]byte, 100)) // in the ring, and not taken
		g = g.restore()
		<-flood
		g.check(g.tr.Resume())
		g.wait(vsockTX)
		g.postEvents(g.resets())
		for {
			got, _ := g.recv()
			if got.op == vsockReset && got.srcPort == h.srcPort {
				break // the answer to the stale packet; what was in the ring before it is from before the snapshot
			}
		}
		g.forwarded = 0
	}
}

func TestVsockLoadRefusesBadState(t *testing.T) {
	g := newVsockGuest(t)
	g.check(g.tr.Pause())
	state, err := g.dev.Save()
	g.check(err)
	dev := newVsock(t, tempSocket(t))
	for _, bad := range [][]byte{nil, state[:len(state)-1], append(state[:len(state):len(state)], 0), append([]byte{9}, state[1:]...)} {
		if dev.Load(bad) == nil {
			t.Errorf("took %x", bad)
		}
	}
	g.check(dev.Load(state))
}

func TestVsockCloseEndsEverything(t *testing.T) {
	g := newVsockGuest(t)
	parked, accepted := g.park(1), g.park(2)
	g.accepted(2, 9)
	open, _ := g.connect(7)
	mute := g.dial()
	waiting := g.dial()
	fmt.Fprint(waiting, "CONNECT 1\n")
	g.expect(vsockRequest)
	g.tr.Close()
	done := make(chan error)
	go func() { done <- g.dev.Close() }()
	select {
	case err := <-done:
		g.check(err)
	case <-time.After(patience):
		t.Fatal("Close does not return")
	}
	for _, c := range []net.Conn{parked, accepted, open, mute, waiting} {
		g.ended(c)
	}
}

// fork is the guest once more, on a device that is loaded with a copy of this one's state. The device must be paused.
func (g *vsockGuest) fork() *vsockGuest {
	g.t.Helper()
	state, err := g.tr.Copy()
	g.check(err)
	mem := newMemory(g.t, testMemory)
	raw := make([]byte, testMemory)
	g.check(errors.Join(g.mem.ReadAt(raw, 0), mem.WriteAt(raw, 0)))
	path := tempSocket(g.t)
	dev := newVsock(g.t, path)
	d := newDriver(g.t, dev, mem)
	d.next = g.next
	for _, q := range g.queues {
		c := *q
		c.free, c.chains = slices.Clone(q.free), maps.Clone(q.chains)
		d.queues = append(d.queues, &c)
	}
	g.check(d.tr.Load(state))
	return &vsockGuest{driver: d, dev: dev, path: path, rx: maps.Clone(g.rx), alloc: g.alloc}
}

// A copy ends the connections for whoever loads it, and for nobody else.
func TestVsockCopyLeavesConnections(t *testing.T) {
	g := newVsockGuest(t)
	c, h := g.connect(7)
	for range 3 {
		g.check(g.tr.Pause())
		child := g.fork()
		g.check(g.tr.Resume())
		if g.resets() != 0 {
			t.Fatal("the machine that goes on was told that its connections are gone")
		}
		fmt.Fprint(c, "still here")
		if _, p := g.expect(vsockData); string(p) != "still here" {
			t.Fatalf("the guest reads %q", p)
		}
		g.reply(h, vsockData, []byte("so am I"))
		if got := g.read(c, 7); got != "so am I" {
			t.Fatalf("the host reads %q", got)
		}

		early := child.dial()
		fmt.Fprint(early, "CONNECT 8\n")
		g.check(child.tr.Resume())
		if _, n := child.wait(vsockEvent); n != 4 || child.resets() != 0 {
			t.Fatalf("an event of %d bytes, or more than one", n)
		}
		child.silent()
		child.postEvents(1)
		child.expect(vsockRequest)
	}
}
