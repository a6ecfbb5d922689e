package gateway

import (
	"context"
	"errors"
	"io"
	stdlog "log"
	"net"
	"net/http"
	"net/http/httputil"
	"strconv"
	"time"

	"torpor/api/apierr"
	"torpor/api/hop"
)

// errLeaseEnded is the cause given to a request whose sandbox stopped serving.
var errLeaseEnded = errors.New("the sandbox stopped serving")

// dialError marks a failure that came before a byte was sent into the guest.
type dialError struct{ err error }

func (e *dialError) Error() string { return "dial the sandbox: " + e.err.Error() }
func (e *dialError) Unwrap() error { return e.err }

// flight is one request on its way into one sandbox.
type flight struct {
	lease     Lease
	sandboxID string
	port      uint16
	held      time.Duration // until the sandbox was ready
}

// forward gives the request to the guest once and streams the answer back as it comes.
func (h *Handler) forward(w http.ResponseWriter, r *http.Request, f *flight) {
	r = hop.Begin(w, r)
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		select {
		case <-f.lease.Done():
			cancel(errLeaseEnded)
		case <-ctx.Done():
		}
	}()
	defer func() { cancel(nil); <-watched }()

	transport := h.transport(f)
	defer transport.CloseIdleConnections()
	proxy := httputil.ReverseProxy{
		Transport:      transport,
		Rewrite:        rewrite,
		FlushInterval:  -1,
		ModifyResponse: func(res *http.Response) error { finish(res, f.held); return nil },
		ErrorHandler:   func(w http.ResponseWriter, r *http.Request, err error) { h.failed(w, r, f, err) },
		ErrorLog:       stdlog.New(io.Discard, "", 0), // cut streams are no news: the abort says it
	}
	proxy.ServeHTTP(w, r.WithContext(ctx))
}

// transport speaks HTTP/1.1 over one new connection. Without keep-alive it never retries: only requests on a reused
// connection are sent again by net/http.
func (h *Handler) transport(f *flight) *http.Transport {
	return &http.Transport{
		DialContext:            func(ctx context.Context, _, _ string) (net.Conn, error) { return h.dial(ctx, f) },
		DisableKeepAlives:      true,
		DisableCompression:     true,
		ExpectContinueTimeout:  5 * time.Second,
		MaxResponseHeaderBytes: 1 << 20, // the guest writes them
	}
}

// dial opens the connection into the guest. A sandbox that is ready has an envd, so a refused envd is dialled again within
// the budget: a closed port reads as "not running" to SDKs. Other ports are the user's: refused is the answer.
func (h *Handler) dial(ctx context.Context, f *flight) (net.Conn, error) {
	conn, err := f.lease.Dial(ctx, f.port)
	if err == nil {
		return hop.AnswerFirst{Conn: conn}, nil
	}
	if f.port != EnvdPort {
		return nil, &dialError{err}
	}
	budget, cancel := context.WithTimeout(ctx, h.cfg.DialBudget)
	defer cancel()
	for wait := 5 * time.Millisecond; ; wait = min(2*wait, 250*time.Millisecond) {
		select {
		case <-budget.Done():
			return nil, &dialError{err}
		case <-time.After(wait):
		}
		if conn, err = f.lease.Dial(budget, f.port); err == nil {
			return hop.AnswerFirst{Conn: conn}, nil
		}
	}
}

// rewrite passes the client's request on as it came, but for our own headers.
func rewrite(pr *httputil.ProxyRequest) {
	pr.Out.URL.Scheme = "http"
	pr.Out.URL.Host = "sandbox" // never resolved: the transport dials the lease
	pr.Out.URL.RawQuery = pr.In.URL.RawQuery
	for _, name := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
		if values, ok := pr.In.Header[name]; ok {
			pr.Out.Header[name] = values
		}
	}
	hop.Strip(pr.Out.Header)
}

// finish cleans an answer's header and says how long the sandbox was waited for.
func finish(res *http.Response, held time.Duration) {
	hop.Strip(res.Header)
	if res.StatusCode != http.StatusSwitchingProtocols {
		hop.Announce(res.Request, res.Header)
	}
	res.Header.Add("Server-Timing", "wake;dur="+strconv.FormatFloat(float64(held.Microseconds())/1000, 'f', 3, 64))
}

// failed answers a request for which no answer came out of the guest.
func (h *Handler) failed(w http.ResponseWriter, r *http.Request, f *flight, err error) {
	var undelivered *dialError
	hop.Announce(r, w.Header())
	ended := errors.Is(context.Cause(r.Context()), errLeaseEnded)
	switch {
	case r.Context().Err() != nil && !ended:
		panic(http.ErrAbortHandler) // the client has gone
	case errors.Is(err, ErrPortClosed) && f.port != EnvdPort && !ended:
		answerPortClosed(w, r, f.sandboxID, f.port)
	case ended || !errors.As(err, &undelivered):
		h.log.Warn().Str("sandbox", f.sandboxID).Uint16("port", f.port).Err(err).Msg("sandbox cut a request")
		answerCut(w, r, f.sandboxID)
	default:
		h.log.Warn().Str("sandbox", f.sandboxID).Uint16("port", f.port).Err(err).Msg("sandbox not reachable")
		answerError(w, r, apierr.New(apierr.NotReady, "the sandbox runs but does not take connections; try again").
			For(f.sandboxID).With("running", "unresponsive"))
	}
}
