package e2b

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"net/http"
	"strconv"
	"time"
)

// EnvdPort is the guest port of envd.
const EnvdPort = 49983

// Signature is a signed /files URL: the right to read or write one path, given by whoever holds the sandbox's token.
type Signature struct {
	Path      string // as the caller wrote it, may be relative or empty
	Operation string // read | write
	User      string // as in the query; empty when absent
	Value     string // "v1_…"
	Expires   string // unix seconds as in the query; empty means never
}

// SignatureOf finds the signature of a /files request. ok is false if r is no such request or carries none.
func SignatureOf(r *http.Request) (s Signature, ok bool) {
	if r.URL.Path != "/files" {
		return s, false
	}
	switch r.Method {
	case http.MethodGet, http.MethodHead:
		s.Operation = "read"
	case http.MethodPost:
		s.Operation = "write"
	default:
		return s, false
	}
	q := r.URL.Query()
	s.Path, s.User, s.Value, s.Expires = q.Get("path"), q.Get("username"), q.Get("signature"), q.Get("signature_expiration")
	return s, s.Value != ""
}

// Matches reports, in constant time, whether the signature was made with token. It does not look at the clock.
func (s Signature) Matches(token string) bool {
	return token != "" && subtle.ConstantTimeCompare([]byte(s.Value), []byte(s.sign(token))) == 1
}

// Expired reports whether the signature has an expiration that lies before now or is no number.
func (s Signature) Expired(now time.Time) bool {
	if s.Expires == "" {
		return false
	}
	at, err := strconv.ParseInt(s.Expires, 10, 64)
	return err != nil || now.Unix() > at
}

// sign computes the signature value: "v1_" and the unpadded standard base64 of SHA-256 over the parts joined by ":".
func (s Signature) sign(token string) string {
	raw := s.Path + ":" + s.Operation + ":" + s.User + ":" + token
	if s.Expires != "" {
		raw += ":" + s.Expires
	}
	sum := sha256.Sum256([]byte(raw))
	return "v1_" + base64.RawStdEncoding.EncodeToString(sum[:])
}
