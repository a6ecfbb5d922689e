package gateway_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"torpor/agent/gateway"
	"torpor/api/apierr"
)

const (
	sandboxID = "i0123456789abcdefghij"
	token     = "the-token-of-the-sandbox"
)

// node is a Sandboxes with one sandbox whose guest is an HTTP server of the test's.
type node struct {
	guest net.Addr

	mu       sync.Mutex
	ready    bool          // else it is paused, and a wake makes it ready
	hold     chan struct{} // if set, Acquire waits for it
	fail     error         // what Acquire answers instead
	dialErrs []error       // what the next dials answer
	done     chan struct{}
	held     sync.WaitGroup // the leases: each ends after its answer has been sent
	wakes    int
	dials    int
	released int
}

type lease struct{ n *node }

func (n *node) Acquire(ctx context.Context, id string, wake func(string) bool) (gateway.Lease, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.fail != nil {
		return nil, n.fail
	}
	if id != sandboxID || (!n.ready && !wake(token)) {
		return nil, apierr.New(apierr.NotFound, "sandbox %q not found", id)
	}
	if n.hold != nil {
		hold := n.hold
		n.mu.Unlock()
		var err error
		select {
		case <-hold:
		case <-ctx.Done():
			err = ctx.Err()
		}
		n.mu.Lock()
		if err != nil {
			return nil, err
		}
	}
	if !n.ready {
		n.ready = true
		n.wakes++
	}
	n.held.Add(1)
	return lease{n}, nil
}

func (l lease) Dial(ctx context.Context, port uint16) (net.Conn, error) {
	l.n.mu.Lock()
	l.n.dials++
	if len(l.n.dialErrs) > 0 {
		err := l.n.dialErrs[0]
		l.n.dialErrs = l.n.dialErrs[1:]
		l.n.mu.Unlock()
		return nil, err
	}
	l.n.mu.Unlock()
	return (&net.Dialer{}).DialContext(ctx, l.n.guest.Network(), l.n.guest.String())
}

func (l lease) Done() <-chan struct{} { return l.n.done }

func (l lease) Release() {
	l.n.mu.Lock()
	defer l.n.mu.Unlock()
	l.n.released++
	l.n.held.Done()
}

func (n *node) count() (wakes, dials, released int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.wakes, n.dials, n.released
}

// start serves a gateway in front of a guest and returns its URL. Every lease must have been released at the end.
func start(t *testing.T, guest http.HandlerFunc) (*node, string) {
	t.Helper()
	g := httptest.NewServer(guest)
	n := &node{guest: g.Listener.Addr(), ready: true, done: make(chan struct{})}
	s := httptest.NewServer(gateway.New(n, gateway.Config{DialBudget: 200 * time.Millisecond}, zerolog.Nop()))
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
		g.CloseClientConnections()
		g.Close()
	})
	return n, s.URL
}

// request aims at a port of the sandbox, with the token.
func request(t *testing.T, method, url string, port string) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set(gateway.SandboxHeader, sandboxID)
	r.Header.Set(gateway.PortHeader, port)
	r.Header.Set("X-Access-Token", token)
	return r
}

func do(t *testing.T, r *http.Request) *http.Response {
	t.Helper()
	res, err := http.DefaultTransport.RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { res.Body.Close() })
	return res
}

var errRefused = errors.Join(errors.New("ERR refused"), gateway.ErrPortClosed)
