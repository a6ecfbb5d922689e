// Package edge is the front door: it tells sandbox traffic from REST, finds the sandbox that traffic is for, and streams it
// to the gateway of the sandbox's node. It never guesses about readiness and buffers nothing; whether a request may wake a
// sandbox is the gateway's decision.
package edge

import (
	"context"
	"errors"
	"io"
	stdlog "log"
	"net/http"
	"net/http/httputil"
	"strconv"

	"github.com/rs/zerolog"

	"torpor/api/apierr"
	"torpor/api/e2b"
	"torpor/api/hop"
	"torpor/api/id"
	"torpor/controlplane/fleet"
	"torpor/controlplane/reply"
	"torpor/controlplane/rest"
	"torpor/controlplane/store"
)

// Edge is the handler of the one public listener.
type Edge struct {
	domain string
	rest   http.Handler
	store  *store.Store
	node   *fleet.Node
	proxy  *httputil.ReverseProxy
	log    zerolog.Logger
}

// New returns the handler. domain is that of sandbox host names, empty for none but localhost.
func New(domain string, restHandler http.Handler, s *store.Store, node *fleet.Node, dp fleet.DataPlane, log zerolog.Logger) *Edge {
	e := &Edge{domain: domain, rest: restHandler, store: s, node: node, log: log}
	e.proxy = &httputil.ReverseProxy{
		Transport:      dp.Transport(),
		Rewrite:        rewrite,
		FlushInterval:  -1,
		ModifyResponse: clean,
		ErrorHandler:   e.failed,
		ErrorLog:       stdlog.New(io.Discard, "", 0), // an aborted stream is the guest's, and the gateway logs it
	}
	return e
}

// ServeHTTP serves REST and sandbox traffic.
func (e *Edge) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	t, complaint := resolve(r, e.domain)
	if (t.kind != bySandbox || t.port == e2b.EnvdPort) && rest.Preflight(w, r) {
		return
	}
	switch t.kind {
	case isREST:
		e.rest.ServeHTTP(w, r)
	case isMalformed:
		http.Error(w, complaint, http.StatusBadRequest)
	case bySandbox:
		e.forward(w, r, t.sandboxID, t.port)
	case byToken, bySignature:
		sandboxID, err := e.owner(r.Context(), t)
		if err != nil {
			e.log.Error().Err(err).Msg("looking up sandbox traffic")
			reply.Error(w, err)
			return
		}
		e.forward(w, r, sandboxID, t.port)
	}
}

// owner finds the sandbox whose token made the request. For a token that is nobody's it returns an id that is nobody's, so
// that the answer is the gateway's one answer for the unknown.
func (e *Edge) owner(ctx context.Context, t target) (string, error) {
	var row store.Sandbox
	var err error
	if t.kind == byToken {
		row, err = e.store.ByToken(ctx, t.token)
	} else {
		row, err = e.signer(ctx, t.signature)
	}
	if errors.Is(err, store.ErrNotFound) {
		return id.NewSandbox(), nil
	}
	return row.ID, err
}

// signer tries a signature against the tokens of all sandboxes the node has: a signed URL names none. An expired signature
// finds its sandbox too; envd refuses it with its own words.
func (e *Edge) signer(ctx context.Context, s e2b.Signature) (store.Sandbox, error) {
	sandboxes, err := e.node.List(ctx)
	if err != nil {
		return store.Sandbox{}, err
	}
	ids := make([]string, len(sandboxes))
	for i, sb := range sandboxes {
		ids[i] = sb.SandboxId
	}
	rows, err := e.store.Live(ctx, ids)
	if err != nil {
		return store.Sandbox{}, err
	}
	for _, row := range rows {
		if s.Matches(row.AccessToken) {
			return row, nil
		}
	}
	return store.Sandbox{}, store.ErrNotFound
}

// forward streams one request to the gateway.
func (e *Edge) forward(w http.ResponseWriter, r *http.Request, sandboxID string, port uint16) {
	defer hop.CutOnAbort(w)
	r = hop.Begin(w, r)
	r.Header = r.Header.Clone()
	hop.Strip(r.Header)
	r.Header.Set(hop.SandboxHeader, sandboxID)
	r.Header.Set(hop.PortHeader, strconv.Itoa(int(port)))
	e.proxy.ServeHTTP(w, r)
	hop.Finish(w, r)
}

// rewrite passes the client's request on as it came.
func rewrite(pr *httputil.ProxyRequest) {
	pr.Out.URL.Scheme = "http"
	pr.Out.URL.Host = "gateway" // never resolved: the transport dials the socket
	pr.Out.URL.RawQuery = pr.In.URL.RawQuery
	for _, name := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
		if values, ok := pr.In.Header[name]; ok {
			pr.Out.Header[name] = values
		}
	}
}

// clean makes an answer of the gateway the client's.
func clean(res *http.Response) error {
	hop.Strip(res.Header)
	if res.StatusCode != http.StatusSwitchingProtocols {
		hop.Announce(res.Request, res.Header)
	}
	return nil
}

// failed answers when no answer came from the gateway.
func (e *Edge) failed(w http.ResponseWriter, r *http.Request, err error) {
	var undelivered *fleet.DialError
	switch {
	case r.Context().Err() != nil:
	case errors.As(err, &undelivered):
		hop.Announce(r, w.Header())
		rest.AllowOrigins(w.Header())
		reply.Error(w, apierr.New(apierr.NodeUnreachable, "the node's gateway does not answer; try again"))
		return
	default:
		e.log.Warn().Err(err).Msg("gateway cut a request")
	}
	// The request may have been delivered and nobody knows its fate: an abort says just that.
	panic(http.ErrAbortHandler)
}
