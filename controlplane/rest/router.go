package rest

import (
	"errors"
	"net/http"
	"net/url"
	"runtime/debug"
	"slices"
	"strings"

	"torpor/api/apierr"
	"torpor/api/id"
	"torpor/controlplane/reply"
)

// handler answers one route. An error it returns becomes the error body; it has then written nothing.
type handler func(w http.ResponseWriter, r *http.Request) error

// route is one line of the routing table.
type route struct {
	method  string
	pattern []string // path segments; "{name}" matches any one segment
	handle  handler
	open    bool // needs no key
}

func newRoute(method, pattern string, h handler) route {
	return route{method: method, pattern: strings.Split(pattern, "/")[1:], handle: h}
}

// ServeHTTP answers a REST request. Every answer is JSON, also for what has no route, and for a panic.
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	AllowOrigins(w.Header())
	defer a.recover(w, r)
	found, allowed := a.match(r)
	if (found == nil || !found.open) && !a.keys.Valid(r.Header.Get("X-Api-Key")) {
		reply.Error(w, apierr.New(apierr.Unauthorized, "the X-API-KEY header is missing or holds no valid API key"))
		return
	}
	switch {
	case found == nil && len(allowed) > 0:
		w.Header().Set("Allow", strings.Join(allowed, ", "))
		reply.Status(w, http.StatusMethodNotAllowed, "method_not_allowed", r.Method+" is not allowed here; allowed: "+strings.Join(allowed, ", "))
	case found == nil:
		reply.Error(w, apierr.New(apierr.NotFound, "there is no route %s %s", r.Method, r.URL.EscapedPath()))
	default:
		if err := checkID(r); err != nil {
			reply.Error(w, err)
		} else if err := found.handle(w, r); err != nil {
			a.failed(w, r, err)
		}
	}
}

// match finds the route of r and sets its path values. Without one, allowed holds the methods the path has.
func (a *API) match(r *http.Request) (found *route, allowed []string) {
	segments := strings.Split(strings.TrimPrefix(r.URL.EscapedPath(), "/"), "/")
	for i := range a.routes {
		rt := &a.routes[i]
		values, ok := fit(rt.pattern, segments)
		if !ok {
			continue
		}
		if rt.method != r.Method && (rt.method != http.MethodGet || r.Method != http.MethodHead) {
			if !slices.Contains(allowed, rt.method) {
				allowed = append(allowed, rt.method)
			}
			continue
		}
		for name, value := range values {
			r.SetPathValue(name, value)
		}
		return rt, nil
	}
	return nil, allowed
}

// fit matches escaped path segments against a pattern.
func fit(pattern, segments []string) (values map[string]string, ok bool) {
	if len(pattern) != len(segments) {
		return nil, false
	}
	values = map[string]string{}
	for i, want := range pattern {
		got, err := url.PathUnescape(segments[i])
		if err != nil {
			return nil, false
		}
		if name, isValue := strings.CutPrefix(want, "{"); isValue && got != "" {
			values[strings.TrimSuffix(name, "}")] = got
		} else if got != want {
			return nil, false
		}
	}
	return values, true
}

// checkID refuses what cannot be a sandbox id on the routes that take one.
func checkID(r *http.Request) error {
	if s := r.PathValue("sandboxID"); s != "" && !id.ValidSandbox(s) {
		return apierr.New(apierr.BadRequest, "Invalid sandbox ID")
	}
	return nil
}

// failed answers and, for faults that are ours, logs an error.
func (a *API) failed(w http.ResponseWriter, r *http.Request, err error) {
	e := apierr.As(err)
	if sandboxID := r.PathValue("sandboxID"); e.SandboxID == "" && sandboxID != "" {
		e = e.For(sandboxID)
	}
	if e.HTTP() >= 500 && e.Code != apierr.NotImplemented && !errors.Is(err, r.Context().Err()) {
		a.log.Error().Str("method", r.Method).Str("path", r.URL.Path).Str("code", string(e.Code)).Err(err).Msg("request failed")
	}
	reply.Error(w, e)
}

func (a *API) recover(w http.ResponseWriter, r *http.Request) {
	switch v := recover(); v {
	case nil:
	case http.ErrAbortHandler:
		panic(v)
	default:
		a.log.Error().Interface("panic", v).Bytes("stack", debug.Stack()).Str("path", r.URL.Path).Msg("request panicked")
		reply.Error(w, apierr.New(apierr.Internal, "internal error; the log says more"))
	}
}
