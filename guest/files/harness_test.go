package files

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"testing"

	"github.com/rs/zerolog"

	"torpor/guest/env"
)

type me struct{ home string }

func (m me) Lookup(name string) (env.User, error) {
	if name != "tester" {
		return env.User{}, &env.UnknownUserError{Name: name}
	}
	return env.User{Name: name, UID: uint32(os.Getuid()), GID: uint32(os.Getgid()), Home: m.home}, nil
}

type harness struct {
	t         *testing.T
	url, home string
	handler   *Handler
}

func newHarness(t *testing.T, token string) *harness {
	t.Helper()
	home := t.TempDir()
	store, err := env.NewStore("", env.Identity{DefaultUser: "tester", AccessToken: token}, me{home})
	if err != nil {
		t.Fatal(err)
	}
	h := New(store, zerolog.Nop())
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	return &harness{t: t, url: server.URL + "/files", home: home, handler: h}
}

// do sends a request; headers are pairs. The transport adds no encodings of its own.
func (h *harness) do(method string, q url.Values, body io.Reader, headers ...string) (*http.Response, string) {
	h.t.Helper()
	r, err := http.NewRequest(method, h.url+"?"+q.Encode(), body)
	if err != nil {
		h.t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	client := http.Client{Transport: &http.Transport{DisableCompression: true, DisableKeepAlives: true}}
	resp, err := client.Do(r)
	if err != nil {
		h.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		h.t.Fatal(err)
	}
	return resp, string(text)
}

func (h *harness) get(path string, headers ...string) (*http.Response, string) {
	h.t.Helper()
	return h.do("GET", url.Values{"path": {path}}, nil, headers...)
}

type part struct{ disposition, content string }

// form builds a multipart body with dispositions written as they are.
func form(parts ...part) (io.Reader, string) {
	var b bytes.Buffer
	for _, p := range parts {
		fmt.Fprintf(&b, "--xyz\r\nContent-Disposition: form-data; %s\r\nContent-Type: application/octet-stream\r\n\r\n%s\r\n", p.disposition, p.content)
	}
	b.WriteString("--xyz--\r\n")
	return &b, "multipart/form-data; boundary=xyz"
}

func (h *harness) read(name string) string {
	h.t.Helper()
	content, err := os.ReadFile(filepath.Join(h.home, name))
	if err != nil {
		h.t.Error(err)
	}
	return string(content)
}
