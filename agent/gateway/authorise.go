package gateway

import (
	"crypto/subtle"
	"net/http"
	"path"
	"time"

	"torpor/api/e2b"
)

// authorised reports whether r may wake a sandbox whose access token is token. Ports other than envd's are public, and so
// is a sandbox without a token; envd's port needs the token or, for /files, a valid signature made with it.
func authorised(r *http.Request, port uint16, token string, now time.Time) bool {
	if port != EnvdPort || token == "" {
		return true
	}
	if subtle.ConstantTimeCompare([]byte(r.Header.Get("X-Access-Token")), []byte(token)) == 1 {
		return true
	}
	s, ok := e2b.SignatureOf(r)
	return ok && s.Matches(token) && !s.Expired(now)
}

// internalRoute reports whether an envd path belongs to the platform and must not be reached from outside (e2b-wire F.1).
func internalRoute(p string) bool {
	switch path.Clean("/" + p) {
	case "/init", "/freeze", "/unfreeze", "/collapse", "/fsfreeze", "/fsthaw", "/upgrade":
		return true
	}
	return false
}
