package virtio

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"
)

func TestVsockHostConnects(t *testing.T) {
	g := newVsockGuest(t)
	c, h := g.connect(49983)
	fmt.Fprint(c, "ping")
	if _, p := g.expect(vsockData); string(p) != "ping" {
		t.Fatalf("the guest reads %q", p)
	}
	g.reply(h, vsockData, []byte("pong"))
	if got := g.read(c, 4); got != "pong" {
		t.Fatalf("the host reads %q", got)
	}
	// The host has no more to say; the guest still does.
	g.check(c.CloseWrite())
	if got, _ := g.expect(vsockShutdown); got.flags != vsockNoSend {
		t.Fatalf("shutdown with flags %d", got.flags)
	}
	g.reply(h, vsockData, []byte("last words"))
	bye := g.packet(h, vsockShutdown)
	bye.flags = vsockNoSend | vsockNoReceive
	g.send(bye, nil)
	g.expect(vsockReset)
	if got, err := io.ReadAll(c); string(got) != "last words" || err != nil {
		t.Fatalf("the host reads %q, %v", got, err)
	}
}

func TestVsockGuestHalfCloses(t *testing.T) {
	g := newVsockGuest(t)
	c, h := g.connect(80)
	g.reply(h, vsockData, []byte("request"))
	bye := g.packet(h, vsockShutdown)
	bye.flags = vsockNoSend
	g.send(bye, nil)
	if got, err := io.ReadAll(c); string(got) != "request" || err != nil {
		t.Fatalf("the host reads %q, %v", got, err)
	}
	fmt.Fprint(c, "answer")
	if _, p := g.expect(vsockData); string(p) != "answer" {
		t.Fatalf("the guest reads %q", p)
	}
	c.Close()
	g.expect(vsockShutdown)
	bye.flags |= vsockNoReceive
	g.send(bye, nil)
	g.expect(vsockReset)
	g.idle()
}

// A guest that answers early and closes, with bytes of the host unread, looks like just that: no reset.
func TestVsockGuestAnswersEarly(t *testing.T) {
	g := newVsockGuest(t)
	g.alloc = 10
	c, h := g.connect(80)
	fmt.Fprint(c, strings.Repeat("upload", 10000))
	g.expect(vsockData)
	g.reply(h, vsockData, []byte("too large"))
	bye := g.packet(h, vsockShutdown)
	bye.flags = vsockNoSend | vsockNoReceive
	g.send(bye, nil)
	if got, err := io.ReadAll(c); string(got) != "too large" || err != nil {
		t.Fatalf("the host reads %q, %v", got, err)
	}
	if _, err := c.Write([]byte("more")); err == nil {
		t.Error("the host can still write")
	}
	g.idle()
}

func TestVsockGuestRefuses(t *testing.T) {
	g := newVsockGuest(t)
	c := g.dial()
	fmt.Fprint(c, "CONNECT 1\n")
	h, _ := g.expect(vsockRequest)
	g.reply(h, vsockReset, nil)
	g.ended(c)
	g.idle()
}

func TestVsockGuestConnects(t *testing.T) {
	g := newVsockGuest(t)
	c := g.park(1024)
	g.refused(1025, 5556)
	h := g.accepted(1024, 5555)
	g.reply(h, vsockData, []byte("hello 42\n"))
	if got := g.read(c, 9); got != "hello 42\n" {
		t.Fatalf("the host reads %q", got)
	}
	fmt.Fprint(c, "hi")
	if _, p := g.expect(vsockData); string(p) != "hi" {
		t.Fatalf("the guest reads %q", p)
	}
	g.refused(1024, 5556) // one client, one connection
	c.Close()
	g.expect(vsockShutdown)
	g.reply(h, vsockReset, nil)
	g.idle()
}

func TestVsockParkedClientsAreServedInTurn(t *testing.T) {
	g := newVsockGuest(t)
	first, other, second := g.park(7), g.park(8), g.park(7)
	for i, c := range []*net.UnixConn{first, second} {
		h := g.accepted(7, uint32(100+i))
		g.reply(h, vsockData, fmt.Append(nil, i))
		if got := g.read(c, 1); got != fmt.Sprint(i) {
			t.Fatalf("client %d reads %q", i, got)
		}
	}
	g.refused(7, 102)
	h := g.accepted(8, 103)
	fmt.Fprint(other, "x")
	if got, p := g.expect(vsockData); got.dstPort != h.dstPort || string(p) != "x" {
		t.Fatalf("%q on port %d", p, got.dstPort)
	}
}

func TestVsockParkedClientHangsUp(t *testing.T) {
	g := newVsockGuest(t)
	c := g.park(7)
	c.Close()
	g.idle()
	g.refused(7, 100)
	c = g.park(7)
	g.check(c.CloseWrite()) // nor does half of one make a connection
	g.ended(c)
	g.idle()
	g.refused(7, 100)
}

// What a client says ahead is the guest's first, also when the client waits from before the driver was up.
func TestVsockParkedClientSpeaksFirst(t *testing.T) {
	path := tempSocket(t)
	dev := newVsock(t, path)
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fmt.Fprint(c, "LISTEN 7\nahead")
	ok := make([]byte, 3)
	if _, err := io.ReadFull(c, ok); err != nil || string(ok) != "OK\n" {
		t.Fatalf("%q, %v", ok, err)
	}
	g := attachVsockGuest(t, dev)
	h := g.accepted(7, 100)
	if got, p := g.expect(vsockData); got.dstPort != h.dstPort || string(p) != "ahead" {
		t.Fatalf("the guest reads %q on port %d", p, got.dstPort)
	}
}

// Parked clients outlive what the guest's driver does and a snapshot: the guest does not know them.
func TestVsockParkedClientsStay(t *testing.T) {
	g := newVsockGuest(t)
	g.check(g.tr.Pause())
	c := g.park(7)
	fmt.Fprint(c, "ahead")
	_, err := g.dev.Save()
	g.check(err)
	g.check(g.tr.Resume())
	g.postEvents(1)
	h := g.accepted(7, 100)
	if got, p := g.expect(vsockData); got.dstPort != h.dstPort || string(p) != "ahead" {
		t.Fatalf("the guest reads %q on port %d", p, got.dstPort)
	}
	g.park(8)
	g.set(tStatus, 0)
	g.ended(c)
	g.dev.mu.Lock()
	defer g.dev.mu.Unlock()
	if len(g.dev.parked) != 1 {
		t.Errorf("%d clients wait after a reset", len(g.dev.parked))
	}
}

func TestVsockParkingIsBounded(t *testing.T) {
	g := newVsockGuest(t)
	var parked []*net.UnixConn
	for port := range uint32(vsockMaxParked) {
		parked = append(parked, g.park(port))
	}
	c := g.dial()
	fmt.Fprint(c, "LISTEN 9\n")
	g.ended(c)
	g.accepted(5, 100)
	g.park(9) // the place of one that has its connection
	parked[6].Close()
	g.eventually(func() bool { return len(g.dev.parked) < vsockMaxParked })
	g.park(9)
}

func TestVsockHostPeerVanishes(t *testing.T) {
	g := newVsockGuest(t)
	c, h := g.connect(80)
	g.check(c.Close())
	g.expect(vsockShutdown)
	g.reply(h, vsockData, []byte("to nobody"))
	g.expect(vsockReset)
	// What follows belongs to no connection.
	g.reply(h, vsockData, []byte("to nobody"))
	g.expect(vsockReset)
	g.idle()

	// A client that hangs up before the guest answers, with and without more than its line.
	for _, said := range []string{"", "CONN", "CONNECT 9\n", "CONNECT 9\nmore"} {
		c := g.dial()
		fmt.Fprint(c, said)
		if strings.Contains(said, "\n") {
			h, _ = g.expect(vsockRequest)
		}
		c.Close()
		if strings.Contains(said, "\n") {
			g.reply(h, vsockResponse, nil)
			for got, _ := g.recv(); got.op != vsockReset; got, _ = g.recv() {
				if got.op != vsockShutdown && got.op != vsockData {
					t.Fatalf("operation %d after the client hung up", got.op)
				}
			}
		}
		g.idle()
	}
}

func TestVsockFirstLine(t *testing.T) {
	for line, want := range map[string]struct {
		order vsockOrder
		rest  string
		ok    bool
	}{
		"CONNECT 1\n":                            {vsockOrder{false, 1}, "", true},
		"CONNECT 4294967295\nGET / HTTP/1.1\n\n": {vsockOrder{false, 4294967295}, "GET / HTTP/1.1\n\n", true},
		"LISTEN 1024\n":                          {vsockOrder{true, 1024}, "", true},
		"LISTEN 0\nx":                            {vsockOrder{true, 0}, "x", true},
		"LISTEN 4294967296\n":                    {},
		"LISTEN\n":                               {},
		"LISTEN  1\n":                            {},
		"LISTEN 1 1\n":                           {},
		"CONNECT 4294967296\n":                   {},
		"CONNECT -1\n":                           {},
		"CONNECT \n":                             {},
		"CONNECT 1 \n":                           {},
		"CONNECT 1\r\n":                          {},
		"connect 1\n":                            {},
		"\n":                                     {},
		"":                                       {},
		"CONNECT 1":                              {},
		"CONNECT 0000000000000000000000000000001\n": {},
		strings.Repeat("x", 1<<16):                  {},
	} {
		order, rest, err := readOrder(strings.NewReader(line))
		if (err == nil) != want.ok || err == nil && (order != want.order || string(rest) != want.rest) {
			t.Errorf("%.40q: %+v, %q, %v", line, order, rest, err)
		}
		order2, rest2, err2 := readOrder(iotestOneByte{strings.NewReader(line)})
		if (err2 == nil) != (err == nil) || err == nil && (order2 != order || !strings.HasPrefix(string(rest), string(rest2))) {
			t.Errorf("%.40q byte by byte: %+v, %v", line, order2, err2)
		}
	}
}

func FuzzVsockFirstLine(f *testing.F) {
	for _, seed := range []string{"CONNECT 1\n", "LISTEN 1024\nhello", "CONNECT", "LISTEN 99999999999\n", "\n", "listen 1\n", strings.Repeat("L", 100)} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		order, rest, err := readOrder(bytes.NewReader(in))
		if err != nil {
			return
		}
		line := fmt.Sprintf("CONNECT %d\n", order.port)
		if order.listen {
			line = fmt.Sprintf("LISTEN %d\n", order.port)
		}
		said, _, _ := bytes.Cut(in, []byte("\n"))
		if again, _, err := readOrder(strings.NewReader(line)); err != nil || again != order || len(said) >= vsockLineBytes {
			t.Errorf("%q is understood as %+v", in, order)
		}
		if end := len(said) + 1; !bytes.HasPrefix(in[end:], rest) {
			t.Errorf("%q leaves %q", in, rest)
		}
	})
}

// iotestOneByte gives one byte a read.
type iotestOneByte struct{ r io.Reader }

func (o iotestOneByte) Read(p []byte) (int, error) { return o.r.Read(p[:min(1, len(p))]) }

func TestVsockClosesOnABadLine(t *testing.T) {
	g := newVsockGuest(t)
	c := g.dial()
	fmt.Fprintln(c, "HELLO")
	g.ended(c)
	g.idle()
}

func TestVsockLosesPatience(t *testing.T) {
	g := attachVsockGuest(t, newVsockLimited(t, tempSocket(t), vsockLimits{line: time.Millisecond, request: patience}))
	g.ended(g.dial())
	g = attachVsockGuest(t, newVsockLimited(t, tempSocket(t), vsockLimits{line: patience, request: time.Millisecond}))
	c := g.dial()
	fmt.Fprint(c, "CONNECT 1\n")
	h, _ := g.expect(vsockRequest)
	g.ended(c)
	g.expect(vsockReset)
	g.reply(h, vsockResponse, nil) // too late
	g.expect(vsockReset)
	g.idle()
}

func TestVsockRefusesBeforeTheDriverIsUp(t *testing.T) {
	path := tempSocket(t)
	newVsock(t, path)
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fmt.Fprint(c, "CONNECT 1\n")
	if p, _ := io.ReadAll(c); len(p) != 0 {
		t.Fatalf("the host reads %q", p)
	}
}

func TestVsockTakesTheListener(t *testing.T) {
	for _, cid := range []uint64{0, 1, 2, testCID, 1<<32 - 1, 1 << 40} {
		l := listen(t, tempSocket(t))
		dev, err := NewVsock(cid, l)
		if (err == nil) != (cid == testCID) {
			t.Errorf("context id %d: %v", cid, err)
		}
		if err == nil {
			err = dev.Close()
			if err != nil {
				t.Error(err)
			}
		}
		if err := l.Close(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("context id %d: the listener was left open (%v)", cid, err)
		}
	}
}

// Bytes go through whole, both ways at once, while the guest has hardly any buffer.
func TestVsockBulk(t *testing.T) {
	total := 100 << 20
	if testing.Short() || raceEnabled {
		total = 4 << 20
	}
	g := newVsockGuest(t)
	g.alloc = 3000
	c, h := g.connect(7)
	g.check(c.SetDeadline(time.Time{}))
	sentSum, gotSum := sha256.New(), sha256.New()
	errs, done := make(chan error, 2), make(chan struct{})
	go func() {
		p := pattern(1<<20, 3)
		for left := total; left > 0; left -= len(p) {
			sentSum.Write(p)
			if _, err := c.Write(p); err != nil {
				errs <- err
				return
			}
		}
		errs <- nil
	}()
	go func() {
		defer close(done)
		_, err := io.CopyN(gotSum, c, int64(total))
		c.CloseWrite() // one more packet, so that the guest looks again
		errs <- err
	}()
	g.echo(h, func() bool {
		select {
		case <-done:
			return true
		default:
			return false
		}
	})
	g.check(errors.Join(<-errs, <-errs))
	if !bytes.Equal(sentSum.Sum(nil), gotSum.Sum(nil)) {
		t.Fatal("what came back is not what was sent")
	}
}

// A host that does not read holds the guest up at its credit, and a guest that breaks it loses the connection.
func TestVsockCredit(t *testing.T) {
	g := newVsockGuest(t)
	c, h := g.connect(7)
	sent := 0
	chunk := make([]byte, 4096)
	stuck := func() bool {
		g.dev.mu.Lock()
		defer g.dev.mu.Unlock()
		conn := g.dev.conns[vsockKey{h.srcPort, h.dstPort}]
		return conn.received-conn.forwarded > conn.alloc-4096
	}
	for ; !stuck(); sent += len(chunk) {
		g.reply(h, vsockData, chunk)
	}
	g.reply(h, vsockData, chunk)
	g.expect(vsockReset)
	if got, err := io.Copy(io.Discard, c); err != nil || got > int64(sent) {
		t.Errorf("the host reads %d bytes, %v", got, err)
	}
}

func TestVsockManyConnections(t *testing.T) {
	g := newVsockGuest(t)
	var conns []*net.UnixConn
	var headers []vsockHeader
	ports := map[uint32]bool{}
	for range vsockMaxConns {
		c, h := g.connect(7)
		if ports[h.srcPort] {
			t.Fatal("a host port twice")
		}
		ports[h.srcPort] = true
		conns, headers = append(conns, c), append(headers, h)
	}
	g.ended(g.dial())
	g.reply(vsockHeader{srcPort: 1024, dstPort: 1}, vsockRequest, nil)
	g.expect(vsockReset)
	for i, c := range conns {
		fmt.Fprintf(c, "%d", i)
		h, p := g.expect(vsockData)
		if h.srcPort != headers[i].srcPort || string(p) != fmt.Sprint(i) {
			t.Fatalf("connection %d: %q on another one", i, p)
		}
	}
	for i, c := range conns {
		c.Close()
		g.expect(vsockShutdown)
		g.reply(headers[i], vsockReset, nil)
	}
	g.idle()
	g.connect(7)
}
