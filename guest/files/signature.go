package files

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// Operations a signature can permit.
const (
	opRead  = "read"
	opWrite = "write"
)

// sign returns the signature of one file URL. user is the query value as given, "" if absent; expires is the query value
// as given, "" if absent.
func sign(path, operation, user, token, expires string) string {
	raw := path + ":" + operation + ":" + user + ":" + token
	if expires != "" {
		raw += ":" + expires
	}
	sum := sha256.Sum256([]byte(raw))
	return "v1_" + base64.RawStdEncoding.EncodeToString(sum[:])
}

// authorise checks a request against the sandbox's token: the header if there is one, else the signature. It answers ""
// if the request may go on, else why not.
func authorise(h http.Header, q url.Values, operation, token string, now time.Time) string {
	if token == "" {
		return ""
	}
	if given := h.Get("X-Access-Token"); given != "" {
		if subtle.ConstantTimeCompare([]byte(given), []byte(token)) != 1 {
			return "access token present in header but does not match"
		}
		return ""
	}
	if !q.Has("signature") {
		return "missing signature query parameter"
	}
	expires := q.Get("signature_expiration")
	want := sign(q.Get("path"), operation, q.Get("username"), token, expires)
	// A client that did not escape the signature's "+" sent a space.
	given := strings.ReplaceAll(q.Get("signature"), " ", "+")
	if subtle.ConstantTimeCompare([]byte(given), []byte(want)) != 1 {
		return "invalid signature"
	}
	if expires == "" {
		return ""
	}
	until, err := strconv.ParseInt(expires, 10, 64)
	if err != nil || now.Unix() > until {
		return "signature is already expired"
	}
	return ""
}
