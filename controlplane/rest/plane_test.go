package rest_test

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"torpor/controlplane/auth"
	"torpor/controlplane/fakeagent"
	"torpor/controlplane/fleet"
	"torpor/controlplane/rest"
	"torpor/controlplane/store"
)

// plane is a control plane over a fake agent.
type plane struct {
	t     testing.TB
	url   string
	key   string
	agent *fakeagent.Agent
	store *store.Store
	node  *fleet.Node
	dir   string
}

func newPlane(t testing.TB, cfg rest.Config) *plane {
	t.Helper()
	dir := t.TempDir()
	s, err := store.Open(t.Context(), filepath.Join(dir, "controlplane.db"))
	if err != nil {
		t.Fatal(err)
	}
	keys, err := auth.Load(t.Context(), dir, s)
	if err != nil {
		t.Fatal(err)
	}
	key, err := os.ReadFile(filepath.Join(dir, auth.KeyFile))
	if err != nil {
		t.Fatal(err)
	}
	agent := fakeagent.Start(t)
	node := fleet.NewNode(fleet.Config{Socket: agent.Socket, Patience: 200 * time.Millisecond}, zerolog.Nop())
	if cfg.MaxTimeout == 0 {
		cfg.MaxTimeout = 24 * time.Hour
	}
	cfg.Version = "test"
	dp := fleet.DataPlane{Socket: filepath.Join(dir, "g.sock"), Patience: 200 * time.Millisecond}
	api := rest.New(cfg, s, node, dp, keys, zerolog.Nop())
	server := httptest.NewServer(api)
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
		node.Close()
		s.Close()
	})
	return &plane{t: t, url: server.URL, key: strings.TrimSpace(string(key)), agent: agent, store: s, node: node, dir: dir}
}

// answer is a response, read.
type answer struct {
	status int
	header http.Header
	raw    string
	body   map[string]any // nil unless it is a JSON object
}

// call makes a request with the key. An empty body is none.
func (p *plane) call(method, path, body string) answer {
	p.t.Helper()
	return p.send(method, path, body, map[string]string{"X-API-KEY": p.key})
}

func (p *plane) send(method, path, body string, header map[string]string) answer {
	p.t.Helper()
	var reader io.Reader
	if body != "" {
		reader = io.MultiReader(strings.NewReader(body)) // of unknown length: chunked, as the JS SDK sends it
	}
	req, err := http.NewRequest(method, p.url+path, reader)
	if err != nil {
		p.t.Fatal(err)
	}
	for k, v := range header {
		req.Header.Set(k, v)
	}
	res, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		p.t.Fatalf("%s %s: %v", method, path, err)
	}
	defer res.Body.Close()
	raw, err := io.ReadAll(res.Body)
	if err != nil {
		p.t.Fatalf("%s %s: %v", method, path, err)
	}
	a := answer{status: res.StatusCode, header: res.Header, raw: string(raw)}
	_ = json.Unmarshal(raw, &a.body)
	return a
}

// create makes a sandbox and returns its id.
func (p *plane) create(body string) string {
	p.t.Helper()
	a := p.call("POST", "/v2/sandboxes", body)
	if a.status != http.StatusCreated {
		p.t.Fatalf("create: %d %s", a.status, a.raw)
	}
	return a.body["sandboxID"].(string)
}

func (p *plane) want(a answer, status int, fields map[string]any) {
	p.t.Helper()
	if a.status != status {
		p.t.Fatalf("status %d, want %d: %s", a.status, status, a.raw)
	}
	for k, v := range fields {
		if a.body[k] != v {
			p.t.Errorf("%s = %v, want %v: %s", k, a.body[k], v, a.raw)
		}
	}
}
