package guest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/ttrpc"

	"torpor/api/apierr"
	"torpor/api/guestpb"
)

// fakeGuest serves a hybrid vsock socket as a VMM with an envd behind it does.
type fakeGuest struct {
	t      *testing.T
	socket string
	ports  map[string]func(net.Conn) // what answers on a vsock port; nil closes without OK

	incarnation atomic.Uint64 // what the data plane says
	handshake   func(*guestpb.HandshakeRequest) (*guestpb.HandshakeResponse, error)
	refuse      atomic.Int32 // connections to the control port still refused
	work        sync.WaitGroup
}

func newFakeGuest(t *testing.T) *fakeGuest {
	t.Helper()
	f := &fakeGuest{t: t, socket: filepath.Join(t.TempDir(), "vsock.sock")}
	l, err := net.Listen("unix", f.socket)
	if err != nil {
		t.Fatal(err)
	}
	f.ports = map[string]func(net.Conn){"49983": f.serveHTTP, "1024": f.serveControl, "1025": f.serveForwarder}
	f.work.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			f.work.Go(func() { f.serve(conn) })
		}
	})
	t.Cleanup(func() { l.Close(); f.work.Wait() })
	return f
}

func (f *fakeGuest) serve(conn net.Conn) {
	defer conn.Close()
	line, err := readLine(conn)
	if err != nil {
		return
	}
	port, _ := strings.CutPrefix(line, "CONNECT ")
	serve := f.ports[port]
	if serve == nil {
		return
	}
	if port == "1024" && f.refuse.Add(-1) >= 0 {
		return
	}
	fmt.Fprintf(conn, "OK 1073741824\n")
	serve(conn)
}

func (f *fakeGuest) serveHTTP(conn net.Conn) {
	if _, err := http.ReadRequest(bufio.NewReader(conn)); err != nil {
		return
	}
	fmt.Fprintf(conn, "HTTP/1.1 204 No Content\r\nTorpor-Incarnation: %d\r\n\r\n", f.incarnation.Load())
}

func (f *fakeGuest) serveForwarder(conn net.Conn) {
	line, err := readLine(conn)
	if err != nil {
		return
	}
	switch line {
	case "CONNECT 80":
		fmt.Fprintf(conn, "OK\nhello")
	case "CONNECT 81":
		fmt.Fprintf(conn, "ERR refused connection refused\n")
	case "CONNECT 82":
		fmt.Fprintf(conn, "ERR timeout\n")
	case "CONNECT 83":
		fmt.Fprint(conn, strings.Repeat("x", 1000))
	case "CONNECT 84":
		fmt.Fprint(conn, "MAYBE\n")
	case "CONNECT 85":
		io.Copy(io.Discard, conn) // says nothing
	}
}

type control struct {
	guestpb.GuestService
	f *fakeGuest
}

func (c control) Handshake(_ context.Context, r *guestpb.HandshakeRequest) (*guestpb.HandshakeResponse, error) {
	if c.f.handshake != nil {
		resp, err := c.f.handshake(r)
		return resp, apierr.ToStatus(err)
	}
	c.f.incarnation.Store(r.Incarnation)
	return &guestpb.HandshakeResponse{EnvdVersion: "0.6.13", BootId: "b", Incarnation: r.Incarnation}, nil
}

// oneConn is a listener that has one connection to give.
type oneConn struct {
	conn chan net.Conn
	done chan struct{}
	once sync.Once
}

func (l *oneConn) Accept() (net.Conn, error) {
	select {
	case c := <-l.conn:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}
func (l *oneConn) Close() error   { l.once.Do(func() { close(l.done) }); return nil }
func (l *oneConn) Addr() net.Addr { return &net.UnixAddr{} }

// watched tells when a connection is closed by either side.
type watched struct {
	net.Conn
	once   sync.Once
	closed chan struct{}
}

func (w *watched) Read(p []byte) (int, error) {
	n, err := w.Conn.Read(p)
	if err != nil {
		w.once.Do(func() { close(w.closed) })
	}
	return n, err
}

func (f *fakeGuest) serveControl(conn net.Conn) {
	server, err := ttrpc.NewServer()
	if err != nil {
		f.t.Error(err)
		return
	}
	guestpb.RegisterGuestService(server, control{f: f})
	w := &watched{Conn: conn, closed: make(chan struct{})}
	l := &oneConn{conn: make(chan net.Conn, 1), done: make(chan struct{})}
	l.conn <- w
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(context.Background(), l) })
	<-w.closed
	server.Close()
	serving.Wait()
}

func bounded(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

const enough = 20 * time.Second

func request(n uint64) *guestpb.HandshakeRequest {
	return &guestpb.HandshakeRequest{Incarnation: n, Entropy: Entropy()}
}

func TestHandshakeThenProbeProveAnIncarnation(t *testing.T) {
	f := newFakeGuest(t)
	f.refuse.Store(3) // not listening yet
	g := At(f.socket)
	req := request(7)
	c, err := g.Handshake(bounded(t, enough), req)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if c.EnvdVersion() != "0.6.13" || time.Since(time.Unix(0, req.RealtimeUnixNano)) > enough {
		t.Errorf("version %q, time %d", c.EnvdVersion(), req.RealtimeUnixNano)
	}
	if _, err := g.Probe(bounded(t, enough), 7); err != nil {
		t.Error(err)
	}
	f.incarnation.Store(6)
	if _, err := g.Probe(bounded(t, enough), 7); err == nil {
		t.Error("an answer of an earlier incarnation was believed")
	}
	c.Close()
	select {
	case <-c.Lost():
	case <-time.After(enough):
		t.Error("the end of the contact is not told")
	}
}

func TestHandshakeDoesNotBelieveWhatIsNotPlausible(t *testing.T) {
	for name, resp := range map[string]*guestpb.HandshakeResponse{
		"incarnation":  {EnvdVersion: "1", BootId: "b", Incarnation: 6},
		"no version":   {BootId: "b", Incarnation: 7},
		"long version": {EnvdVersion: strings.Repeat("9", 100), BootId: "b", Incarnation: 7},
		"control code": {EnvdVersion: "1\x1b[31m", BootId: "b", Incarnation: 7},
	} {
		f := newFakeGuest(t)
		f.handshake = func(*guestpb.HandshakeRequest) (*guestpb.HandshakeResponse, error) { return resp, nil }
		if _, err := At(f.socket).Handshake(bounded(t, enough), request(7)); !errors.Is(err, &apierr.Error{Code: apierr.NotReady}) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestAnAnsweredRefusalIsFinalAndKeepsItsCode(t *testing.T) {
	f := newFakeGuest(t)
	calls := 0
	f.handshake = func(*guestpb.HandshakeRequest) (*guestpb.HandshakeResponse, error) {
		calls++
		return nil, apierr.New(apierr.BadRequest, "entropy is missing")
	}
	_, err := At(f.socket).Handshake(bounded(t, enough), request(7))
	if !errors.Is(err, &apierr.Error{Code: apierr.BadRequest}) || calls != 1 {
		t.Errorf("got %v after %d calls", err, calls)
	}
}

func TestHandshakeWithNobodyThereEndsWithItsCauseAndTheLastError(t *testing.T) {
	cause := errors.New("envd did not answer in time")
	ctx, cancel := context.WithTimeoutCause(context.Background(), 500*time.Millisecond, cause)
	defer cancel()
	_, err := At(filepath.Join(t.TempDir(), "none")).Handshake(ctx, request(1))
	if !errors.Is(err, cause) || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("got %v", err)
	}
}

func TestDialReachesPortsAndTellsClosedFromBroken(t *testing.T) {
	f := newFakeGuest(t)
	g := At(f.socket)
	conn, err := g.Dial(bounded(t, enough), 80)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(conn); string(got) != "hello" || err != nil {
		t.Errorf("the stream begins with %q, %v", got, err)
	}
	conn.Close()
	for port, closed := range map[uint16]bool{81: true, 82: false, 83: false, 84: false} {
		_, err := g.Dial(bounded(t, enough), port)
		if err == nil || errors.Is(err, ErrClosed) != closed {
			t.Errorf("port %d: got %v", port, err)
		}
	}
	if _, err := g.Dial(bounded(t, 50*time.Millisecond), 85); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a silent forwarder: %v", err)
	}
	f.ports = nil
	if _, err := g.Dial(bounded(t, enough), EnvdPort); err == nil || errors.Is(err, ErrClosed) {
		t.Errorf("an envd that is not there reads as a closed port: %v", err)
	}
}

func TestHello(t *testing.T) {
	vsock := filepath.Join(t.TempDir(), "vsock.sock")
	vmm, err := net.Listen("unix", vsock)
	if err != nil {
		t.Fatal(err)
	}
	defer vmm.Close()
	h, err := ListenHello(vsock) // nobody answers yet
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	go func() {
		for _, text := range []string{"", "goodbye\n", "hello \x00\n", strings.Repeat("a", 500), "hello 1234-abcd\n"} {
			conn, err := vmm.Accept()
			if err != nil {
				t.Error(err)
				return
			}
			if line, err := readLine(conn); err != nil || line != "LISTEN 1024" {
				t.Errorf("the VMM is told %q, %v", line, err)
			}
			fmt.Fprint(conn, "OK\n"+text)
			conn.Close()
		}
	}()
	if id, err := h.Wait(bounded(t, enough)); err != nil || id != "1234-abcd" {
		t.Errorf("got %q, %v", id, err)
	}
}

func TestHelloEndsWithItsContextOrTheVMM(t *testing.T) {
	vsock := filepath.Join(t.TempDir(), "vsock.sock")
	vmm, err := net.Listen("unix", vsock)
	if err != nil {
		t.Fatal(err)
	}
	h, err := ListenHello(vsock)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if _, err := h.Wait(bounded(t, 20*time.Millisecond)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	h, err = ListenHello(vsock)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	vmm.Close()
	if _, err := h.Wait(bounded(t, enough)); err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}

func FuzzReadLine(f *testing.F) {
	f.Add([]byte("OK 1024\nrest"))
	f.Add([]byte("\n"))
	f.Add([]byte(strings.Repeat("x", maxLine+1)))
	f.Fuzz(func(t *testing.T, raw []byte) {
		a, b := net.Pipe()
		go func() {
			a.Write(raw)
			a.Close()
		}()
		line, err := readLine(b)
		b.Close()
		if err == nil && (strings.Contains(line, "\n") || len(line) >= maxLine || !strings.HasPrefix(string(raw), line+"\n")) {
			t.Errorf("read %q of %q", line, raw)
		}
	})
}

func FuzzAnswers(f *testing.F) {
	f.Add("OK 1073741824")
	f.Add("OK")
	f.Add("ERR refused x")
	f.Add("OK 99999999999999999999")
	f.Fuzz(func(t *testing.T, s string) {
		if accepted(s) == nil {
			if _, err := strconv.ParseUint(strings.TrimPrefix(s, "OK "), 10, 32); err != nil {
				t.Errorf("accepted %q", s)
			}
		}
		if forwarded(s) == nil && s != "OK" {
			t.Errorf("forwarded %q", s)
		}
	})
}
