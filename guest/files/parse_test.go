package files

import (
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"
)

// The vector every client agrees on (e2b-wire A.8).
func TestSignatureVector(t *testing.T) {
	const want = "v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E"
	if got := sign("hello.txt", opRead, "user", "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0", ""); got != want {
		t.Errorf("%s", got)
	}
}

func FuzzAuthorise(f *testing.F) {
	f.Add("path=f&signature=v1_x", "", "token")
	f.Add("path=f&signature=v1_x&signature_expiration=99999999999999999999", "", "token")
	f.Add("signature_expiration=-1&signature", "x", "t")
	f.Fuzz(func(t *testing.T, query, header, token string) {
		q, err := url.ParseQuery(query)
		if err != nil || token == "" {
			return
		}
		// Nobody gets in by luck: a signature a fuzzer can find is not one, unless it is computed here.
		h := http.Header{"X-Access-Token": {header}}
		ok := authorise(h, q, opRead, token, time.Unix(0, 0)) == ""
		right := header == token || header == "" && strings.ReplaceAll(q.Get("signature"), " ", "+") ==
			sign(q.Get("path"), opRead, q.Get("username"), token, q.Get("signature_expiration"))
		if ok && !right {
			t.Errorf("let in: %q %q", query, header)
		}
	})
}

func TestPartFile(t *testing.T) {
	for _, test := range []struct{ disposition, name, filename string }{
		{`form-data; name="file"; filename="a.txt"`, "file", "a.txt"},
		{`form-data; name="file"; filename="/0/a b.txt"`, "file", "/0/a b.txt"},
		{`form-data; name="file"; filename="/0/ä b;=.txt"`, "file", "/0/ä b;=.txt"},
		{`form-data; name="file"; filename="a%22b%0D%0Ac%20d"`, "file", "a\"b\r\nc%20d"},
		{`form-data; name="file"; filename="a\"b\\c\d"`, "file", `a"b\c\d`},
		{`form-data; name=file; filename=a%20b.txt`, "file", "a b.txt"},
		{`form-data; name=file; filename=100%.txt ; x=y`, "file", "100%.txt"},
		{`form-data; filename*=UTF-8''%E2%82%AC.txt; name="file"; filename="EUR.txt"`, "file", "€.txt"},
		{`form-data; NAME="file"; FileName="x"`, "file", "x"},
		{`form-data; name="file"`, "file", ""},
		{`form-data; name="file"; filename=""`, "file", ""},
		{`form-data; name="file; filename="x"`, `file; filename=`, ""},
		{`form-data; name="fi`, "fi", ""},
		{`form-data`, "", ""},
		{``, "", ""},
		{`;;;=;="`, "", ""},
	} {
		if name, filename := partFile(test.disposition); name != test.name || filename != test.filename {
			t.Errorf("%s: %q, %q", test.disposition, name, filename)
		}
	}
}

func FuzzPartFile(f *testing.F) {
	for _, seed := range []string{
		`form-data; name="file"; filename="a.txt"`, `;filename="\`, `;filename=%`, `;filename*=UTF-8''%zz`, `;;=`, `;a="b" c;d=e`,
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, s string) {
		name, filename := partFile(s)
		if len(name) > len(s) || len(filename) > len(s) {
			t.Errorf("%q: more came out than went in: %q, %q", s, name, filename)
		}
		if !strings.ContainsAny(s, "\\%\"") && filename != "" && !strings.Contains(s, filename) {
			t.Errorf("%q: %q is not in it", s, filename)
		}
	})
}

func TestNegotiate(t *testing.T) {
	for _, test := range []struct {
		accept string
		plain  bool
		want   string
	}{
		{"", false, "identity"},
		{"gzip", false, "gzip"},
		{"gzip, deflate", false, "gzip"},
		{"gzip", true, "identity"},
		{"GZIP;Q=0.5", false, "gzip"},
		{"gzip;q=0", false, "identity"},
		{"br", false, "identity"},
		{"*", false, "gzip"},
		{"identity", false, "identity"},
		{"identity, gzip;q=0.5", false, "identity"},
		{"identity;q=0, gzip", false, "gzip"},
		{"identity;q=0", false, ""},
		{"*;q=0", false, ""},
		{"*;q=0, identity", false, "identity"},
		{"gzip;q=x", false, "gzip"},
	} {
		if got, _ := negotiate([]string{test.accept}, test.plain); got != test.want {
			t.Errorf("%q plain %v: %q, want %q", test.accept, test.plain, got, test.want)
		}
	}
}
