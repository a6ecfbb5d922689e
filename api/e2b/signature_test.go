package e2b

import (
	"net/http/httptest"
	"net/url"
	"testing"
	"time"
)

func TestSignatureVector(t *testing.T) {
	r := httptest.NewRequest("GET", "/files?path=hello.txt&username=user&signature="+
		url.QueryEscape("v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E"), nil)
	s, ok := SignatureOf(r)
	if !ok || !s.Matches("0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0") || s.Matches("other") || s.Matches("") {
		t.Errorf("%+v %v", s, ok)
	}
}

func TestSignatureExpires(t *testing.T) {
	now := time.Unix(1000, 0)
	for expires, want := range map[string]bool{"": false, "1000": false, "1001": false, "999": true, "-1": true, "x": true, "99999999999999999999": true} {
		if got := (Signature{Expires: expires}).Expired(now); got != want {
			t.Errorf("expires %q: %v", expires, got)
		}
	}
	made := Signature{Path: "p", Operation: "read", Expires: "1001"}
	made.Value = made.sign("tok")
	if !made.Matches("tok") {
		t.Error("its own signature does not match")
	}
	made.Expires = "1002"
	if made.Matches("tok") {
		t.Error("the expiration is not part of the signature")
	}
}

func TestOnlyFileRequestsCarrySignatures(t *testing.T) {
	for target, want := range map[string]bool{
		"GET /files?signature=v1_x": true, "POST /files?signature=v1_x": true, "DELETE /files?signature=v1_x": false,
		"GET /files": false, "GET /files/compose?signature=v1_x": false, "GET /?signature=v1_x": false,
	} {
		var method, uri string
		for i := range target {
			if target[i] == ' ' {
				method, uri = target[:i], target[i+1:]
			}
		}
		if _, ok := SignatureOf(httptest.NewRequest(method, uri, nil)); ok != want {
			t.Errorf("%s: %v", target, ok)
		}
	}
}
