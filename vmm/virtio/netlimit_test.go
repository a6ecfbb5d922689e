package virtio

import (
	"testing"
	"time"

	"torpor/vmm/guestmem"
	"torpor/vmm/ratelimit"
)

func newLimiter(t testing.TB, limit ratelimit.Limit, clock ratelimit.Clock) *ratelimit.Limiter {
	t.Helper()
	l, err := ratelimit.New(limit, clock)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// silent fails if a frame of the guest is on the wire, once the device has seen all that was done before.
func (g *netGuest) silent() {
	g.t.Helper()
	if s := g.dev.Stats(); s.TXFrames != uint64(g.tap.seen) {
		g.t.Fatalf("%d frames were sent, want %d", s.TXFrames, g.tap.seen)
	}
}

// A limited guest sends as many frames as it may, and then one for each time a token comes in. A pause does not wait for those
// held back, they are not lost, and the tokens go along into the machine that is restored. Receiving is not limited by it.
func TestNetLimitOfSending(t *testing.T) {
	clock := &handClock{}
	limits := func() NetLimits {
		return NetLimits{TX: newLimiter(t, ratelimit.Limit{Ops: ratelimit.Bucket{Size: 2, Refill: 2 * time.Second}}, clock)}
	}
	g := startLimitedNet(t, 0, limits())
	for range 6 {
		g.add(netTX, g.in(netFrame(60, 1)))
	}
	g.notify(netTX)
	g.tap.recv(t)
	g.tap.recv(t)
	g.waitHeld(clock, 1)
	g.silent()
	g.postN(20, 1536)
	for range 5 {
		g.tap.send(t, netFrame(60, 2))
		g.frame()
	}
	clock.move(time.Second)
	g.tap.recv(t)
	g.waitHeld(clock, 2)
	g.silent()
	g.check(g.tr.Pause())
	clock.move(time.Hour) // that is no time for the guest
	g = g.restoreLimited(limits())
	g.check(g.tr.Resume())
	for i := range int32(3) {
		g.waitHeld(clock, 3+i)
		g.silent()
		clock.move(time.Second)
		g.tap.recv(t)
	}
	// A reset does not fill the bucket.
	g.queues, g.next = nil, guestmem.PageSize
	g.init()
	g.add(netTX, g.in(netFrame(60, 1)))
	g.notify(netTX)
	g.waitHeld(clock, 6)
	g.silent()
}

// What goes to a limited guest waits for tokens for its bytes; a frame that is larger than the bucket passes when that is full.
// A pause takes what waits along.
func TestNetLimitOfReceiving(t *testing.T) {
	clock := &handClock{}
	rx := newLimiter(t, ratelimit.Limit{Bytes: ratelimit.Bucket{Size: 1000, Refill: time.Second}}, clock)
	g := startLimitedNet(t, 0, NetLimits{RX: rx})
	g.postN(20, 4096)
	for range 3 {
		g.tap.send(t, netFrame(1500, 1))
	}
	g.frame()
	none := func() {
		t.Helper()
		if _, _, ok := g.poll(netRX); ok {
			t.Fatal("more is received than the limit allows")
		}
	}
	g.waitHeld(clock, 1)
	none()
	clock.move(1500*time.Millisecond - 1) // the debt of 500, and a full bucket
	none()
	clock.move(1)
	g.frame()
	g.waitHeld(clock, 2)
	none()
	g.check(g.tr.Pause())
	g.frame()
	g.check(g.tr.Resume())
	g.add(netTX, g.in(netFrame(60, 1))) // sending is not limited by it
	g.notify(netTX)
	g.tap.recv(t)
	if s := g.dev.Stats(); s.RXFrames != 3 || s.RXDropped != 0 {
		t.Errorf("%+v", s)
	}
}

// The state of a card without limits, as version 1 had it, is still taken, and one with the limits of another is fitted.
func TestNetLoadsOlderState(t *testing.T) {
	g := startNet(t, 0)
	if err := g.dev.Load([]byte{1, 0, 0, 0, 2, 0, 0, 0, 0, 1}); err != nil {
		t.Error(err)
	}
	clock := &handClock{}
	limit := ratelimit.Limit{Ops: ratelimit.Bucket{Size: 2, Refill: time.Second}}
	limited := startLimitedNet(t, 0, NetLimits{RX: newLimiter(t, limit, clock), TX: newLimiter(t, limit, clock)})
	state, err := limited.dev.Save()
	if err != nil {
		t.Fatal(err)
	}
	for _, dev := range []*Net{g.dev, limited.dev} {
		if err := dev.Load(state); err != nil {
			t.Error(err)
		}
		if dev.Load(state[:len(state)-1]) == nil {
			t.Error("a state that was cut short is taken")
		}
		if bad := append(append([]byte{}, state[:14]...), make([]byte, len(state)-14)...); dev.Load(bad) == nil {
			t.Error("tokens of no version are taken")
		}
	}
}
