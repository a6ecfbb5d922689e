package virtio

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"testing"
	"time"
)

// echoGuest is a guest that sends everything back on every connection there is.
type echoGuest struct {
	*vsockGuest
	conns map[vsockKey]*echoConn
}

type echoConn struct {
	sent, forwarded uint32
	pending         []byte
}

// serve answers packets until told to stop.
func (e *echoGuest) serve(until func() bool) {
	e.t.Helper()
	for !until() {
		got, p, ok := e.tryRecv()
		if !ok {
			runtime.Gosched()
			continue
		}
		key := vsockKey{got.srcPort, got.dstPort}
		c := e.conns[key]
		switch {
		case got.op == vsockShutdown:
			e.reply(got, vsockReset, nil)
			delete(e.conns, key)
			continue
		case c == nil:
			e.t.Fatalf("operation %d on no connection", got.op)
		}
		c.pending = append(c.pending, p...)
		for len(c.pending) > 0 && got.bufAlloc > c.sent-got.fwdCnt {
			n := min(uint32(len(c.pending)), got.bufAlloc-(c.sent-got.fwdCnt))
			c.sent += n
			c.forwarded += n
			e.answer(got, c, vsockData, c.pending[:n])
			c.pending = c.pending[n:]
		}
		if got.op == vsockCreditRequest {
			e.answer(got, c, vsockCreditUpdate, nil)
		}
	}
}

func (e *echoGuest) answer(to vsockHeader, c *echoConn, op uint16, payload []byte) {
	h := e.packet(to, op)
	h.fwdCnt = c.forwarded
	e.send(h, payload)
}

func openFDs(t testing.TB) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

func threads(t testing.TB) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// As many connections as there may be, bytes going both ways on all of them at once, each with its own; and nothing is left.
func TestVsockThousandConnectionsAtOnce(t *testing.T) {
	const each = 40 << 10 // more than a turn, and more than the guest's buffer
	g := newVsockGuest(t)
	g.alloc = 10000
	fds, before := openFDs(t), threads(t)
	e := &echoGuest{g, map[vsockKey]*echoConn{}}
	var conns []*net.UnixConn
	for range vsockMaxConns {
		c, h := g.connect(7)
		conns = append(conns, c)
		e.conns[vsockKey{h.srcPort, h.dstPort}] = &echoConn{}
	}
	extra := g.dial()
	g.ended(extra)
	results := make(chan error, len(conns))
	for i, c := range conns {
		g.check(c.SetDeadline(time.Now().Add(10 * patience)))
		p := pattern(each, byte(i))
		p[0], p[1] = byte(i), byte(i>>8)
		go func() {
			written := make(chan error, 1)
			go func() { _, err := c.Write(p); written <- err }()
			back := sha256.New()
			_, err := io.CopyN(back, c, each)
			want := sha256.Sum256(p)
			if err == nil && !bytes.Equal(back.Sum(nil), want[:]) {
				err = errors.New("what came back is not what was sent")
			}
			results <- errors.Join(err, <-written)
		}()
	}
	done := 0
	e.serve(func() bool {
		select {
		case err := <-results:
			g.check(err)
			done++
		default:
		}
		return done == len(conns)
	})
	// Whoever waits for a socket waits in the poller: connections cost no threads.
	if now := threads(t); now > before+20 {
		t.Errorf("%d threads for %d connections, %d before", now, len(conns), before)
	}
	for _, c := range append(conns, extra) {
		c.Close()
	}
	e.serve(func() bool { return len(e.conns) == 0 })
	g.idle()
	if now := openFDs(t); now > fds {
		t.Errorf("%d descriptors are open, %d before", now, fds)
	}
	g.connect(7)
}

// A guest hears of packets that were taken with the next packet it gets, when they are many, or else soon.
func TestVsockTellsOfPacketsTaken(t *testing.T) {
	limits := vsockDefaultLimits
	limits.settle = time.Hour
	g := attachVsockGuest(t, newVsockLimited(t, tempSocket(t), limits))
	c := g.dial()
	io.WriteString(c, "CONNECT 7\n")
	h, _ := g.expect(vsockRequest)
	// sends gives the device n packets and takes them back once it has taken them; interrupts tells whether it said so.
	sends := func(op uint16, payload string, n int) (interrupts bool) {
		t.Helper()
		done := func() bool { return true }
		g.eventually(done) // with what went before
		g.set(tAck, g.get(tInterrupt))
		for range n { // each in memory of its own: the device may be looking already
			h := g.packet(h, op)
			h.len = uint32(len(payload))
			g.add(vsockTX, g.in(append(h.marshal(), payload...)))
		}
		g.notify(vsockTX)
		for range n {
			g.eventually(func() bool { _, _, ok := g.poll(vsockTX); return ok })
		}
		g.eventually(done)
		return g.get(tInterrupt) != 0
	}
	if sends(vsockResponse, "", 1) || sends(vsockData, "hello", 1) || sends(vsockCreditUpdate, "", 3) {
		t.Error("an interrupt for each packet")
	}
	if got := g.read(c, len("OK 1234567890\nhello")); got[14:] != "hello" {
		t.Fatalf("the host reads %q", got)
	}
	io.WriteString(c, "x") // the packet that brings it tells of the others
	g.eventually(func() bool { return g.dev.untold == 0 })
	g.expect(vsockData)
	if sends(vsockCreditUpdate, "", vsockMaxUntold-1) {
		t.Error("an interrupt for a few packets")
	}
	if !sends(vsockCreditUpdate, "", 1) {
		t.Error("no interrupt for many packets")
	}
	g.dev.mu.Lock()
	g.dev.limits.settle, g.dev.settling = time.Millisecond, false
	g.dev.mu.Unlock()
	if !sends(vsockCreditUpdate, "", 1) {
		g.eventually(func() bool { return !g.dev.settling })
		if g.get(tInterrupt) == 0 {
			t.Error("the guest is never told")
		}
	}
}
