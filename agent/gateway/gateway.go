// Package gateway is the data plane of one host: an HTTP handler that brings a request to a port inside a sandbox and
// wakes the sandbox first when it sleeps. It is the one place where a wake is decided.
//
// The edge in front of it names the target in two headers, Torpor-Sandbox and Torpor-Port; everything else is the client's
// request, untouched. The gateway holds a request until the sandbox is ready, and gives it to the guest at most once, over a
// connection of its own: nothing is ever replayed. When the guest goes away in the middle of an answer the client's
// connection is aborted, so that a cut stream cannot be taken for a finished one.
//
// The package knows no state machine: agent/sandbox implements Sandboxes and Lease.
package gateway

import (
	"context"
	"errors"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/rs/zerolog"

	"torpor/api/apierr"
	"torpor/api/e2b"
	"torpor/api/hop"
	"torpor/api/id"
)

// The headers by which the edge names the target. They never reach the guest, and no Torpor-* header of the guest's
// reaches the client.
const (
	SandboxHeader = hop.SandboxHeader
	PortHeader    = hop.PortHeader
)

// EnvdPort is the guest port of the data plane (envd). Access to it needs the sandbox's token; other ports are public.
const EnvdPort = e2b.EnvdPort

// ErrPortClosed is wrapped by Lease.Dial when the guest itself says that nothing listens on the port.
var ErrPortClosed = errors.New("the port is closed inside the sandbox")

// Sandboxes makes sandboxes ready for requests.
type Sandboxes interface {
	// Acquire makes the sandbox ready for one request and counts the request as in flight until the lease is released.
	//
	// wake is asked, with the sandbox's access token, whether this request may wake the sandbox; it is not asked when the
	// sandbox is ready. Acquire holds through transitions within its own budget and joins a wake under way. It returns when
	// ctx ends. Errors are *apierr.Error: not_found (unknown, paused without auto-resume, or not authorised to wake: one and
	// the same error), not_ready with both states (budget spent), and what a wake can end with.
	Acquire(ctx context.Context, sandboxID string, wake func(token string) bool) (Lease, error)
}

// Lease is the right to bring one request to a ready sandbox.
type Lease interface {
	// Dial opens a connection to a port of the guest. It wraps ErrPortClosed when the guest refused it.
	Dial(ctx context.Context, port uint16) (net.Conn, error)
	// Done is closed when the sandbox stops serving this lease: it is paused past its grace, killed, or dead.
	Done() <-chan struct{}
	// Release ends the lease. It is called exactly once.
	Release()
}

// Config holds the times of a Handler. The zero value means the defaults.
type Config struct {
	// DialBudget bounds how long an envd that is ready but not reachable is dialled again before the answer is not_ready.
	// Nothing has been sent by then. Default 10 s; slow hosts multiply it.
	DialBudget time.Duration
}

// Handler serves the data plane. It is safe for concurrent use.
type Handler struct {
	sandboxes Sandboxes
	cfg       Config
	log       zerolog.Logger
}

// New returns the data plane over s.
func New(s Sandboxes, cfg Config, log zerolog.Logger) *Handler {
	if cfg.DialBudget <= 0 {
		cfg.DialBudget = 10 * time.Second
	}
	return &Handler{sandboxes: s, cfg: cfg, log: log}
}

// ServeHTTP brings one request into a sandbox.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	sandboxID, port, ok := target(r)
	if !ok {
		answerError(w, r, apierr.New(apierr.BadRequest, "the gateway needs the headers %s and %s", SandboxHeader, PortHeader))
		return
	}
	if port == EnvdPort && internalRoute(r.URL.Path) {
		answerInternalRoute(w, r)
		return
	}
	defer hop.CutOnAbort(w)
	arrived := time.Now()
	lease, err := h.sandboxes.Acquire(r.Context(), sandboxID, func(token string) bool {
		return authorised(r, port, token, time.Now())
	})
	switch {
	case err == nil:
	case r.Context().Err() != nil:
		panic(http.ErrAbortHandler) // the client has gone: there is nobody to answer
	case errors.Is(err, &apierr.Error{Code: apierr.NotFound}):
		answerNotFound(w, r, sandboxID)
		return
	default:
		h.log.Warn().Str("sandbox", sandboxID).Uint16("port", port).Dur("held", time.Since(arrived)).Err(err).Msg("request not served")
		answerError(w, r, apierr.As(err).For(sandboxID))
		return
	}
	defer lease.Release()
	h.forward(w, r, &flight{lease: lease, sandboxID: sandboxID, port: port, held: time.Since(arrived)})
}

// target reads the edge's headers.
func target(r *http.Request) (sandboxID string, port uint16, ok bool) {
	sandboxID = r.Header.Get(SandboxHeader)
	p, err := strconv.ParseUint(r.Header.Get(PortHeader), 10, 16)
	return sandboxID, uint16(p), err == nil && p > 0 && id.ValidSandbox(sandboxID)
}
