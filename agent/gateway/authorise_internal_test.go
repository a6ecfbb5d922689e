package gateway

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"testing"
	"time"
)

// The signature is the check vector of the protocol (e2b-wire A.8).
const (
	vectorToken     = "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0"
	vectorSignature = "v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E"
)

func TestAuthorised(t *testing.T) {
	files := "/files?path=hello.txt&username=user&signature=" + url.QueryEscape(vectorSignature)
	for _, c := range []struct {
		name, method, target, sent string
		port                       uint16
		token                      string
		want                       bool
	}{
		{"a user's port is public", "GET", "/", "", 8080, vectorToken, true},
		{"a sandbox without a token", "POST", "/process.Process/Start", "", EnvdPort, "", true},
		{"the token", "POST", "/process.Process/Start", vectorToken, EnvdPort, vectorToken, true},
		{"no token", "POST", "/process.Process/Start", "", EnvdPort, vectorToken, false},
		{"a token's beginning", "POST", "/process.Process/Start", vectorToken[:31], EnvdPort, vectorToken, false},
		{"health without a token", "GET", "/health", "", EnvdPort, vectorToken, false},
		{"a signature", "GET", files, "", EnvdPort, vectorToken, true},
		{"of another sandbox", "GET", files, "", EnvdPort, vectorToken + "x", false},
		{"for another operation", "POST", files, "", EnvdPort, vectorToken, false},
		{"on another path", "GET", "/file" + files[6:], "", EnvdPort, vectorToken, false},
		{"with an expiration it was not made for", "GET", files + "&signature_expiration=99999999999", "", EnvdPort, vectorToken, false},
	} {
		r := httptest.NewRequest(c.method, c.target, nil)
		if c.sent != "" {
			r.Header.Set("X-Access-Token", c.sent)
		}
		if got := authorised(r, c.port, c.token, time.Unix(1e9, 0)); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

func TestStripsNothingButItsOwn(t *testing.T) {
	h := http.Header{"Server-Timing": {"db;dur=1"}, "Torpor-Incarnation": {"3"}, "Trailer": {"x"}}
	finish(&http.Response{Header: h, Request: httptest.NewRequest(http.MethodGet, "/", nil)}, 1500*time.Microsecond)
	if len(h) != 2 || h["Server-Timing"][1] != "wake;dur=1.500" {
		t.Errorf("%v", h)
	}
}
