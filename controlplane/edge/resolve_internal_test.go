package edge

import (
	"net/http/httptest"
	"strings"
	"testing"

	"torpor/api/id"
)

func FuzzHost(f *testing.F) {
	for _, s := range []string{
		"", "localhost:3000", "8080-iabc.localhost", "49983-iabc-old.box.test:8443", "80-iabc.box.test.", "-i.localhost", "80-.localhost",
		"[::1]:80", "1-2.3-4.localhost", "80-é.localhost", "99999999999999999999-i.localhost", "\x00-i.localhost", "80-i.localhost:x:y",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, host string) {
		r := httptest.NewRequest("GET", "/", nil)
		r.Host = host
		got, complaint := resolve(r, "box.test:8443")
		switch got.kind {
		case isREST:
		case bySandbox:
			if !id.ValidSandbox(got.sandboxID) || got.port == 0 || complaint != "" {
				t.Errorf("%q was let through as %+v", host, got)
			}
			if lower := strings.ToLower(host); !strings.Contains(lower, ".box.test") && !strings.Contains(lower, ".localhost") {
				t.Errorf("%q is not ours", host)
			}
		case isMalformed:
			if complaint == "" {
				t.Errorf("%q: no complaint", host)
			}
		default:
			t.Errorf("%q: %+v", host, got)
		}
	})
}
