package dataplane

import (
	"context"
	"errors"
	"log"
	"net/http"
	"time"

	"connectrpc.com/connect"
	"github.com/rs/zerolog"
)

const (
	headerTimeout = 60 * time.Second  // a slow host must not make a client look idle
	idleTimeout   = 640 * time.Second // longer than any client keeps its connections
)

// crossOrigin lets browsers on any page call the data plane: what protects it is the token, which a page must know.
func crossOrigin(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Access-Control-Allow-Origin", "*")
		h.Set("Access-Control-Expose-Headers", "*, Torpor-Incarnation, Content-Disposition, Content-Length, Content-Encoding")
		if r.Method != http.MethodOptions || r.Header.Get("Access-Control-Request-Method") == "" {
			next.ServeHTTP(w, r)
			return
		}
		h.Set("Access-Control-Allow-Methods", "GET, HEAD, POST, OPTIONS")
		if asked := r.Header.Get("Access-Control-Request-Headers"); asked != "" {
			h.Set("Access-Control-Allow-Headers", asked)
		}
		h.Set("Access-Control-Max-Age", "7200")
		w.WriteHeader(http.StatusNoContent)
	})
}

// recovered turns a panic of an RPC into an answer; it is a bug and logged as one.
func (p *plane) recovered(_ context.Context, spec connect.Spec, _ http.Header, cause any) error {
	p.log.Error().Interface("panic", cause).Str("rpc", spec.Procedure).Msg("an RPC panicked")
	return connect.NewError(connect.CodeInternal, errors.New("internal error"))
}

// NewServer returns an HTTP server for a data plane, for any number of listeners.
func NewServer(plane http.Handler, l zerolog.Logger) *http.Server {
	return &http.Server{
		Handler:           plane,
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       idleTimeout,
		ErrorLog:          log.New(l.With().Str("from", "http").Logger(), "", 0),
	}
}
