// Package reply writes the answers of the control plane: JSON bodies, truly empty bodies, and the one error body.
package reply

import (
	"encoding/json"
	"net/http"
	"strconv"

	"torpor/api/apierr"
)

// JSON writes v with a length, so that no body is chunked.
func JSON(w http.ResponseWriter, status int, v any) {
	raw, err := json.Marshal(v)
	if err != nil {
		Error(w, apierr.New(apierr.Internal, "encode the answer: %w", err))
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(raw)))
	w.WriteHeader(status)
	_, _ = w.Write(raw) // the client may have gone
}

// NoContent writes 204 without a body.
func NoContent(w http.ResponseWriter) { w.WriteHeader(http.StatusNoContent) }

// Error writes err as the error body, with Retry-After where the table asks for it.
func Error(w http.ResponseWriter, err error) {
	e := apierr.As(err)
	if s := e.RetrySeconds(); s > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(s))
	}
	JSON(w, e.HTTP(), e.Body())
}

// Status writes an error body for a plain HTTP status that is not in the table (405, 413).
func Status(w http.ResponseWriter, status int, word apierr.Code, message string) {
	JSON(w, status, apierr.Body{Code: status, Message: message, Error: word})
}
