// Package files serves /files: reading and writing whole files of the guest over plain HTTP, authorised by the access
// token or by a signed URL.
package files

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"time"

	"github.com/rs/zerolog"

	"torpor/guest/env"
)

// Handler serves GET and POST /files. It does its own authorisation.
type Handler struct {
	store *env.Store
	log   zerolog.Logger
	now   func() time.Time
}

// New returns a Handler that finds token, users and defaults in store.
func New(store *env.Store, log zerolog.Logger) *Handler {
	return &Handler{store: store, log: log, now: time.Now}
}

// maxRefused bounds what is read of the body of a refused upload, in bytes.
const maxRefused = 1 << 30

// Error is the JSON body of every refused request; Code is the HTTP status.
type Error struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}

func (e *Error) Error() string { return e.Message }

// Write answers a request with the error.
func (e *Error) Write(w http.ResponseWriter) {
	h := w.Header()
	h.Set("Content-Type", "application/json; charset=utf-8")
	h.Set("X-Content-Type-Options", "nosniff")
	for _, stale := range []string{"Content-Length", "Content-Encoding", "Content-Disposition", "Last-Modified"} {
		h.Del(stale)
	}
	w.WriteHeader(e.Code)
	_ = json.NewEncoder(w).Encode(e) // the client has gone
}

// ServeHTTP authorises the request and serves it.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	operation, serve := opRead, h.download
	switch r.Method {
	case http.MethodGet, http.MethodHead:
	case http.MethodPost:
		operation, serve = opWrite, h.upload
	default:
		(&Error{http.StatusMethodNotAllowed, "method not allowed: use GET or POST"}).Write(w)
		return
	}
	q, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		(&Error{http.StatusBadRequest, "malformed query: " + err.Error()}).Write(w)
		return
	}
	if why := authorise(r.Header, q, operation, h.store.Get().AccessToken, h.now()); why != "" {
		(&Error{http.StatusUnauthorized, why}).Write(w)
		return
	}
	u, err := h.store.User(q.Get("username"))
	if err == nil {
		err = serve(w, r, u, q)
	}
	if err != nil {
		// Clients that are still sending see a broken connection, not the answer, unless somebody reads what they send.
		_, _ = io.CopyN(io.Discard, r.Body, maxRefused) // a body that ends early is just as well
		h.refuse(w, r, err)
	}
}

// refuse answers with the status an error stands for.
func (h *Handler) refuse(w http.ResponseWriter, r *http.Request, err error) {
	var told *Error
	var unknown *env.UnknownUserError
	var path *env.PathError
	switch {
	case errors.As(err, &told):
	case errors.Is(err, env.ErrNoUser), errors.As(err, &path):
		told = &Error{http.StatusBadRequest, err.Error()}
	case errors.As(err, &unknown):
		told = &Error{http.StatusUnauthorized, err.Error()}
	default:
		told = &Error{http.StatusInternalServerError, err.Error()}
		h.log.Error().Err(err).Str("method", r.Method).Msg("serving a file")
	}
	told.Write(w)
}
