// Package dataplane serves a sandbox's port 49983: the E2B data plane as plain HTTP/1.1, with one access check in front
// of everything.
package dataplane

import (
	"crypto/subtle"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"connectrpc.com/connect"
	"github.com/rs/zerolog"

	"torpor/api/envd/envdconnect"
	"torpor/guest/env"
	"torpor/guest/files"
	"torpor/guest/filesystem"
	"torpor/guest/process"
	"torpor/guest/usage"
)

// IncarnationHeader is on every response: which incarnation of the sandbox answered, 0 before its first handshake.
const IncarnationHeader = "Torpor-Incarnation"

const (
	// maxMessage bounds one RPC message, in bytes; larger content goes through /files.
	maxMessage   = 64 << 20
	unauthorized = "unauthorized access, please provide a valid access token or method signing if supported"
)

// Config is what a data plane consists of. All fields are required but Clock.
type Config struct {
	Store   *env.Store
	Process *process.Service
	Log     zerolog.Logger
	// Clock sets the wall clock as POST /init may ask; nil: that is refused.
	Clock func(time.Time) error
}

// plane serves the plain routes.
type plane struct {
	store *env.Store
	log   zerolog.Logger
	clock func(time.Time) error
	meter usage.Meter
}

// New returns the whole data plane.
func New(c Config) http.Handler {
	p := &plane{store: c.Store, log: c.Log, clock: c.Clock}
	mux := http.NewServeMux()
	for _, route := range []struct {
		method, path string
		serve        http.HandlerFunc
	}{
		{http.MethodGet, "/health", p.health},
		{http.MethodGet, "/metrics", p.metrics},
		{http.MethodGet, "/envs", p.envs},
		{http.MethodPost, "/init", p.init},
	} {
		mux.HandleFunc(route.path, only(route.method, route.serve))
	}
	mux.Handle("/files", files.New(c.Store, c.Log))
	opts := []connect.HandlerOption{
		connect.WithCompression("gzip", nil, nil), // responses are never compressed
		connect.WithReadMaxBytes(maxMessage),
		connect.WithRecover(p.recovered),
	}
	mux.Handle(envdconnect.NewProcessHandler(c.Process, opts...))
	mux.Handle(envdconnect.NewFilesystemHandler(filesystem.New(c.Store), opts...))
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		(&files.Error{Code: http.StatusNotFound, Message: fmt.Sprintf("no route %s %s", r.Method, r.URL.Path)}).Write(w)
	})
	return p.marked(crossOrigin(p.authorised(mux)))
}

// only refuses other methods than the one a route has.
func only(method string, serve http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Method != method && (r.Method != http.MethodHead || method != http.MethodGet) {
			w.Header().Set("Allow", method)
			(&files.Error{Code: http.StatusMethodNotAllowed, Message: "method not allowed: use " + method}).Write(w)
			return
		}
		serve(w, r)
	}
}

// marked says on every response which incarnation answers.
func (p *plane) marked(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set(IncarnationHeader, strconv.FormatUint(p.store.Get().Incarnation, 10))
		next.ServeHTTP(w, r)
	})
}

// authorised checks the access token on all routes but those that do so themselves or are public.
func (p *plane) authorised(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !exempt(r) && !p.holds(r) {
			(&files.Error{Code: http.StatusUnauthorized, Message: unauthorized}).Write(w)
			return
		}
		next.ServeHTTP(w, r)
	})
}

func exempt(r *http.Request) bool {
	switch r.Method + " " + r.URL.Path {
	case "GET /health", "GET /files", "POST /files", "POST /init":
		return true
	}
	return false
}

// holds reports whether the request carries the access token, if there is one.
func (p *plane) holds(r *http.Request) bool {
	token := p.store.Get().AccessToken
	return token == "" || subtle.ConstantTimeCompare([]byte(r.Header.Get("X-Access-Token")), []byte(token)) == 1
}

func (p *plane) health(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusNoContent)
}

func (p *plane) metrics(w http.ResponseWriter, _ *http.Request) {
	sample, err := p.meter.Sample(time.Now())
	if err != nil {
		p.log.Error().Err(err).Msg("taking metrics")
		(&files.Error{Code: http.StatusInternalServerError, Message: err.Error()}).Write(w)
		return
	}
	answer(w, sample)
}

func (p *plane) envs(w http.ResponseWriter, _ *http.Request) { answer(w, p.store.Get().Globals()) }

func answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	_ = json.NewEncoder(w).Encode(v) // the client has gone
}
