package virtio

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
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
	listener, err := net.Listen("unix", g.path+"_1024")
	g.check(err)
	defer listener.Close()
	h := vsockHeader{srcPort: 1024, dstPort: 5555} // as if the host had sent something
	g.reply(h, vsockRequest, nil)
	c, err := listener.Accept()
	g.check(err)
	defer c.Close()
	if got, _ := g.expect(vsockResponse); got.srcPort != 1024 || got.dstPort != 5555 {
		t.Fatalf("response %+v", got)
	}
	g.reply(h, vsockData, []byte("hello 42\n"))
	if got := g.read(c, 9); got != "hello 42\n" {
		t.Fatalf("the host reads %q", got)
	}
	fmt.Fprint(c, "hi")
	if _, p := g.expect(vsockData); string(p) != "hi" {
		t.Fatalf("the guest reads %q", p)
	}

	nobody := vsockHeader{srcPort: 1025, dstPort: 5556}
	g.reply(nobody, vsockRequest, nil)
	if got, _ := g.expect(vsockReset); got.srcPort != 1025 || got.dstPort != 5556 {
		t.Fatalf("reset %+v", got)
	}
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

func TestVsockConnectLine(t *testing.T) {
	for line, want := range map[string]struct {
		port uint32
		rest string
		ok   bool
	}{
		"CONNECT 1\n":                            {1, "", true},
		"CONNECT 4294967295\nGET / HTTP/1.1\n\n": {4294967295, "GET / HTTP/1.1\n\n", true},
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
		port, rest, err := readConnect(strings.NewReader(line))
		if (err == nil) != want.ok || err == nil && (port != want.port || string(rest) != want.rest) {
			t.Errorf("%.40q: %d, %q, %v", line, port, rest, err)
		}
		port2, rest2, err2 := readConnect(iotestOneByte{strings.NewReader(line)})
		if port2 != port || (err2 == nil) != (err == nil) || !strings.HasPrefix(string(rest), string(rest2)) {
			t.Errorf("%.40q byte by byte: %d, %v", line, port2, err2)
		}
	}
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
	if p, _ := io.ReadAll(c); len(p) != 0 {
		t.Fatalf("the host reads %q", p)
	}
}

func TestVsockSocketFile(t *testing.T) {
	path := tempSocket(t)
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)
	stale.Close()
	dev, err := NewVsock(testCID, path)
	if err != nil {
		t.Fatalf("a socket left behind is not replaced: %v", err)
	}
	if err := dev.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if dev, err := NewVsock(testCID, path); err == nil {
		dev.Close()
		t.Error("an ordinary file was replaced")
	}
	for _, cid := range []uint64{0, 1, 2, 1<<32 - 1, 1 << 40} {
		if dev, err := NewVsock(cid, tempSocket(t)); err == nil {
			dev.Close()
			t.Errorf("context id %d was taken", cid)
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
		return conn.received-conn.forwarded > vsockBuffer-4096
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
