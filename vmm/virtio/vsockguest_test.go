package virtio

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"
)

const testCID = 3

// vsockGuest is the guest's end of a vsock device, packet by packet.
type vsockGuest struct {
	*driver
	dev  *Vsock
	path string
	rx   map[uint16][]buffer
	// alloc and forwarded are the credit told to the host in every packet.
	alloc, forwarded uint32
}

func newVsock(t testing.TB, path string) *Vsock {
	t.Helper()
	limits := vsockDefaultLimits
	limits.settle = 0 // a driver that waits for every packet to be taken would have to wait
	return newVsockLimited(t, path, limits)
}

func listen(t testing.TB, path string) *net.UnixListener {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func newVsockLimited(t testing.TB, path string, limits vsockLimits) *Vsock {
	t.Helper()
	dev, err := newVsockWithin(limits, testCID, listen(t, path))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dev.Close() })
	return dev
}

// newVsockGuest starts a device and posts buffers to it: those for packets are of several shapes.
func newVsockGuest(t testing.TB) *vsockGuest {
	t.Helper()
	return attachVsockGuest(t, newVsock(t, tempSocket(t)))
}

func attachVsockGuest(t testing.TB, dev *Vsock) *vsockGuest {
	t.Helper()
	g := &vsockGuest{driver: start(t, dev), dev: dev, path: dev.listener.Addr().String(), rx: map[uint16][]buffer{}, alloc: 64 << 10}
	for i := range 12 {
		switch i % 3 {
		case 0:
			g.postRX(g.out(44 + 4096)) // one descriptor for all
		case 1:
			g.postRX(g.out(44), g.out(4096))
		case 2:
			g.postRX(g.out(30), g.out(1000), g.out(999))
		}
	}
	g.notify(vsockRX)
	g.postEvents(4)
	return g
}

func (g *vsockGuest) postRX(bufs ...buffer) { g.rx[g.add(vsockRX, bufs...)] = bufs }

func (g *vsockGuest) postEvents(n int) {
	for range n {
		g.add(vsockEvent, g.out(4))
	}
	g.notify(vsockEvent)
}

// tryRecv takes a packet if there is one.
func (g *vsockGuest) tryRecv() (h vsockHeader, payload []byte, ok bool) {
	g.t.Helper()
	head, n, ok := g.poll(vsockRX)
	if !ok {
		return h, nil, false
	}
	bufs := g.rx[head]
	delete(g.rx, head)
	var all []byte
	for _, b := range bufs {
		all = append(all, g.bytes(b)...)
	}
	h = parseVsockHeader((*[vsockHeaderBytes]byte)(all))
	if n != vsockHeaderBytes+h.len || h.srcCID != hostCID || h.dstCID != testCID || h.typ != 1 {
		g.t.Fatalf("a packet of %d bytes with header %+v", n, h)
	}
	g.postRX(bufs...)
	g.notify(vsockRX)
	return h, all[vsockHeaderBytes:n], true
}

func (g *vsockGuest) recv() (h vsockHeader, payload []byte) {
	g.t.Helper()
	ok := g.until(func() (ok bool) { h, payload, ok = g.tryRecv(); return ok })
	if !ok {
		g.t.Fatal("no packet came")
	}
	return h, payload
}

// expect takes the next packet, which must be of the given operation; updates of credit are passed over.
func (g *vsockGuest) expect(op uint16) (vsockHeader, []byte) {
	g.t.Helper()
	for {
		h, payload := g.recv()
		if h.op == vsockCreditUpdate && op != vsockCreditUpdate {
			continue
		}
		if h.op != op {
			g.t.Fatalf("operation %d with %d bytes, want %d", h.op, h.len, op)
		}
		return h, payload
	}
}

// packet makes the header of a packet on the connection of h, a packet from the host.
func (g *vsockGuest) packet(h vsockHeader, op uint16) vsockHeader {
	return vsockHeader{
		srcCID: testCID, dstCID: hostCID, srcPort: h.dstPort, dstPort: h.srcPort, typ: 1, op: op,
		bufAlloc: g.alloc, fwdCnt: g.forwarded,
	}
}

// send gives the device a packet and waits until it was taken.
func (g *vsockGuest) send(h vsockHeader, payload []byte) {
	g.t.Helper()
	g.sendRaw(h, payload)
	g.notify(vsockTX)
	g.wait(vsockTX)
}

func (g *vsockGuest) sendRaw(h vsockHeader, payload []byte) {
	mark := g.next
	defer func() { g.next = mark }()
	h.len = max(h.len, uint32(len(payload)))
	if rand.IntN(2) == 0 || len(payload) == 0 {
		g.add(vsockTX, g.in(append(h.marshal(), payload...)))
	} else {
		g.add(vsockTX, g.in(h.marshal()), g.in(payload))
	}
}

func (g *vsockGuest) reply(to vsockHeader, op uint16, payload []byte) {
	g.t.Helper()
	g.send(g.packet(to, op), payload)
}

func (g *vsockGuest) dial() *net.UnixConn {
	g.t.Helper()
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: g.path, Net: "unix"})
	g.check(err)
	g.t.Cleanup(func() { c.Close() })
	g.check(c.SetDeadline(time.Now().Add(patience)))
	return c
}

// connect makes a connection from the host to a port of the guest; the header is the guest's to reply to.
func (g *vsockGuest) connect(port uint32) (*net.UnixConn, vsockHeader) {
	g.t.Helper()
	c := g.dial()
	fmt.Fprintf(c, "CONNECT %d\n", port)
	h, _ := g.expect(vsockRequest)
	if h.dstPort != port {
		g.t.Fatalf("a request for port %d, want %d", h.dstPort, port)
	}
	g.reply(h, vsockResponse, nil)
	want := fmt.Sprintf("OK %d\n", h.srcPort)
	if got := g.read(c, len(want)); got != want {
		g.t.Fatalf("the host reads %q, want %q", got, want)
	}
	return c, h
}

// park has a client wait on a port of the host.
func (g *vsockGuest) park(port uint32) *net.UnixConn {
	g.t.Helper()
	c := g.dial()
	fmt.Fprintf(c, "LISTEN %d\n", port)
	if got := g.read(c, 3); got != "OK\n" {
		g.t.Fatalf("the host reads %q", got)
	}
	return c
}

// accepted makes a connection from a port of the guest to one of the host; the header is the guest's to reply to.
func (g *vsockGuest) accepted(host, guest uint32) vsockHeader {
	g.t.Helper()
	h := vsockHeader{srcPort: host, dstPort: guest} // as if the host had sent something
	g.reply(h, vsockRequest, nil)
	if got, _ := g.expect(vsockResponse); got.srcPort != host || got.dstPort != guest {
		g.t.Fatalf("response %+v", got)
	}
	return h
}

// refused asks for a connection, in vain.
func (g *vsockGuest) refused(host, guest uint32) {
	g.t.Helper()
	g.reply(vsockHeader{srcPort: host, dstPort: guest}, vsockRequest, nil)
	if got, _ := g.expect(vsockReset); got.srcPort != host || got.dstPort != guest {
		g.t.Fatalf("reset %+v", got)
	}
}

func (g *vsockGuest) read(c net.Conn, n int) string {
	g.t.Helper()
	p := make([]byte, n)
	_, err := io.ReadFull(c, p)
	g.check(err)
	return string(p)
}

func (g *vsockGuest) ended(c net.Conn) {
	g.t.Helper()
	if rest, err := io.ReadAll(c); len(rest) > 0 || (err != nil && !isReset(err)) {
		g.t.Fatalf("%q and %v instead of the end", rest, err)
	}
}

func isReset(err error) bool { return strings.Contains(err.Error(), "connection reset") }

// idle waits until the device holds no connection.
func (g *vsockGuest) idle() {
	g.t.Helper()
	g.eventually(func() bool { return len(g.dev.all) == 0 })
}

// eventually waits until cond, which looks at the device, is true without the device having to say so.
func (g *vsockGuest) eventually(cond func() bool) {
	g.t.Helper()
	for end := time.Now().Add(patience); ; runtime.Gosched() {
		g.dev.mu.Lock()
		ok, held := cond(), len(g.dev.all)
		g.dev.mu.Unlock()
		if ok {
			return
		}
		if time.Now().After(end) {
			g.t.Fatalf("the device does not come to it; it holds %d connections", held)
		}
	}
}

// echo is a guest that sends everything back on the connection of h, until told to stop. Its buffer is g.alloc bytes.
func (g *vsockGuest) echo(h vsockHeader, until func() bool) {
	g.t.Helper()
	var (
		pending []byte
		sent    uint32
	)
	for !until() {
		got, p := g.recv()
		pending = append(pending, p...)
		if uint32(len(pending)) > g.alloc {
			g.t.Fatalf("the host sent %d bytes into a buffer of %d", len(pending), g.alloc)
		}
		for len(pending) > 0 && got.bufAlloc > sent-got.fwdCnt {
			n := min(uint32(len(pending)), got.bufAlloc-(sent-got.fwdCnt), 1+rand.Uint32N(8<<10))
			g.forwarded += n
			sent += n
			g.reply(h, vsockData, pending[:n])
			pending = pending[n:]
		}
		if got.op == vsockCreditRequest {
			g.reply(h, vsockCreditUpdate, nil)
		}
	}
}
