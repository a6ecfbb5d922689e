package rest

import "net/http"

// AllowOrigins lets scripts of any origin read an answer: keys and tokens protect, not origins.
func AllowOrigins(header http.Header) {
	header.Set("Access-Control-Allow-Origin", "*")
	header.Set("Access-Control-Expose-Headers", "X-Next-Token, X-Total-Running, Retry-After, Server-Timing")
}

// Preflight answers a browser's CORS preflight, which carries neither key nor token, and reports whether r was one. It
// touches no sandbox.
func Preflight(w http.ResponseWriter, r *http.Request) bool {
	if r.Method != http.MethodOptions || r.Header.Get("Access-Control-Request-Method") == "" {
		return false
	}
	header := w.Header()
	AllowOrigins(header)
	header.Set("Access-Control-Allow-Methods", "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS")
	allowed := r.Header.Get("Access-Control-Request-Headers")
	if allowed == "" {
		allowed = "*"
	}
	header.Set("Access-Control-Allow-Headers", allowed)
	header.Set("Access-Control-Max-Age", "7200")
	header.Set("Vary", "Access-Control-Request-Headers")
	w.WriteHeader(http.StatusNoContent)
	return true
}
