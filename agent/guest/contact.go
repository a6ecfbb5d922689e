package guest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"torpor/api/apierr"
	"torpor/api/guestpb"
)

// incarnationHeader is on every answer of envd: the incarnation of the last handshake.
const incarnationHeader = "Torpor-Incarnation"

// Contact is a control connection to envd that is held open: its end is the first sign that envd is in trouble.
type Contact struct {
	BootID      string        // of the guest's kernel
	HandshakeIn time.Duration // the call alone

	version string
	client  *ttrpc.Client
	service guestpb.GuestService
	lost    chan struct{}
}

// EnvdVersion returns the version envd told in the handshake.
func (c *Contact) EnvdVersion() string { return c.version }

// Lost is closed when the connection has ended, by either side.
func (c *Contact) Lost() <-chan struct{} { return c.lost }

// Close ends the connection.
func (c *Contact) Close() { c.client.Close() }

// Sync flushes the guest's file systems.
func (c *Contact) Sync(ctx context.Context) error {
	if _, err := c.service.Sync(ctx, &guestpb.SyncRequest{}); err != nil {
		return fmt.Errorf("sync the guest: %w", err)
	}
	return nil
}

// Connect opens a control connection.
func (g *Guest) Connect(ctx context.Context) (*Contact, error) {
	conn, err := g.dialVsock(ctx, controlPort)
	if err != nil {
		return nil, err
	}
	c := &Contact{lost: make(chan struct{})}
	c.client = ttrpc.NewClient(conn, ttrpc.WithOnClose(func() { close(c.lost) }), ttrpc.WithUnaryClientInterceptor(typedErrors))
	c.service = guestpb.NewGuestClient(c.client)
	return c, nil
}

// Entropy returns what a handshake gives to the guest's kernel.
func Entropy() []byte {
	b := make([]byte, 256)
	rand.Read(b) // never fails
	return b
}

// Handshake makes the guest ready for an incarnation and returns the connection. A guest that does not take the connection
// yet is tried again until ctx ends; what it answered is final. The time in the request is set here, at the last moment.
func (g *Guest) Handshake(ctx context.Context, req *guestpb.HandshakeRequest) (*Contact, error) {
	var last error // what a try failed of that ctx did not cut short
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, 500*time.Millisecond) {
		c, err := g.handshake(ctx, req)
		if last == nil || ctx.Err() == nil {
			last = err
		}
		if err == nil {
			return c, nil
		}
		if _, answered := errors.AsType[*apierr.Error](err); answered {
			return nil, fmt.Errorf("handshake: %w", err)
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("handshake: %w (last: %w)", context.Cause(ctx), last)
		case <-time.After(pause):
		}
	}
}

func (g *Guest) handshake(ctx context.Context, req *guestpb.HandshakeRequest) (*Contact, error) {
	c, err := g.Connect(ctx)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	req.RealtimeUnixNano = began.UnixNano()
	resp, err := c.service.Handshake(ctx, req)
	if err == nil {
		err = c.check(req, resp)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	c.HandshakeIn = time.Since(began)
	return c, nil
}

// check believes nothing of the answer that is not plausible.
func (c *Contact) check(req *guestpb.HandshakeRequest, resp *guestpb.HandshakeResponse) error {
	if resp.Incarnation != req.Incarnation {
		return apierr.New(apierr.NotReady, "envd answered for incarnation %d instead of %d", resp.Incarnation, req.Incarnation)
	}
	if !word(resp.EnvdVersion) || !word(resp.BootId) {
		return apierr.New(apierr.NotReady, "envd answered a malformed version or boot id")
	}
	c.version, c.BootID = resp.EnvdVersion, resp.BootId
	return nil
}

// word reports whether a string of the guest is short and plain enough to be stored, logged and shown.
func word(s string) bool {
	if len(s) == 0 || len(s) > 64 {
		return false
	}
	for _, b := range []byte(s) {
		if b <= ' ' || b > '~' {
			return false
		}
	}
	return true
}

// Probe asks envd's health over the path of user requests and returns how long the answer took. It is an error if it is not
// healthy or answers for another incarnation.
func (g *Guest) Probe(ctx context.Context, incarnation uint64) (time.Duration, error) {
	client := g.httpClient()
	defer client.CloseIdleConnections()
	began := time.Now()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://envd/health", nil)
	if err != nil {
		return 0, fmt.Errorf("probe envd: %w", err)
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, fmt.Errorf("probe envd: %w", err)
	}
	resp.Body.Close()
	took := time.Since(began)
	if resp.StatusCode/100 != 2 {
		return took, fmt.Errorf("probe envd: it answered status %d", resp.StatusCode)
	}
	if got := resp.Header.Get(incarnationHeader); got != strconv.FormatUint(incarnation, 10) {
		return took, fmt.Errorf("probe envd: it answered for incarnation %.20q, not %d", got, incarnation)
	}
	return took, nil
}

// httpClient makes one connection a request into envd's data plane.
func (g *Guest) httpClient() *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			DialContext:            func(ctx context.Context, _, _ string) (net.Conn, error) { return g.Dial(ctx, EnvdPort) },
			DisableKeepAlives:      true,
			MaxResponseHeaderBytes: 64 << 10,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// typedErrors gives callers the *apierr.Error the guest answered with; any other refusal becomes one, since it is an answer.
func typedErrors(ctx context.Context, req *ttrpc.Request, resp *ttrpc.Response, _ *ttrpc.UnaryClientInfo, call ttrpc.Invoker) error {
	if err := call(ctx, req, resp); err != nil {
		return err
	}
	if s := resp.GetStatus(); s != nil && s.GetCode() != int32(codes.OK) {
		return apierr.As(apierr.FromStatus(status.ErrorProto(s)))
	}
	return nil
}
