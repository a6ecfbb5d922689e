package dataplane

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"torpor/guest/env"
	"torpor/guest/process"
)

type me struct{ home string }

func (m me) Lookup(name string) (env.User, error) {
	if name != "tester" {
		return env.User{}, &env.UnknownUserError{Name: name}
	}
	return env.User{Name: name, UID: uint32(os.Getuid()), GID: uint32(os.Getgid()), Home: m.home}, nil
}

type harness struct {
	t     *testing.T
	url   string
	store *env.Store
	clock time.Time // what the clock was last set to
}

func newHarness(t *testing.T, id env.Identity) *harness {
	t.Helper()
	id.DefaultUser = "tester"
	store, err := env.NewStore("", id, me{t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	processes, err := process.New(process.Config{Store: store, Log: zerolog.Nop(), KeepUser: os.Geteuid() != 0})
	if err != nil {
		t.Fatal(err)
	}
	h := &harness{t: t, store: store}
	plane := New(Config{Store: store, Process: processes, Log: zerolog.Nop(), Clock: func(c time.Time) error {
		h.clock = c
		return nil
	}})
	server := httptest.NewUnstartedServer(nil)
	server.Config = NewServer(plane, zerolog.Nop())
	server.Start()
	t.Cleanup(server.Close)
	h.url = server.URL
	return h
}

// do sends a request; headers are pairs.
func (h *harness) do(method, path, body string, headers ...string) (*http.Response, string) {
	h.t.Helper()
	r, err := http.NewRequest(method, h.url+path, strings.NewReader(body))
	if err != nil {
		h.t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		h.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		h.t.Fatal(err)
	}
	return resp, strings.TrimSpace(string(text))
}

const (
	stat       = "/filesystem.Filesystem/Stat"
	list       = "/process.Process/List"
	refusal    = `{"code":401,"message":"unauthorized access, please provide a valid access token or method signing if supported"}`
	asJSON     = "application/json"
	connectErr = `{"code":"not_found","message":"file not found: lstat /nope: no such file or directory"}`
)

func TestAccess(t *testing.T) {
	h := newHarness(t, env.Identity{AccessToken: "right", Incarnation: 7})
	for _, test := range []struct {
		method, path, token string
		status              int
	}{
		{"GET", "/health", "", 204},
		{"POST", "/health", "", 401},
		{"POST", "/health", "right", 405},
		{"GET", "/metrics", "", 401},
		{"GET", "/metrics", "wrong", 401},
		{"GET", "/metrics", "right", 200},
		{"GET", "/envs", "", 401},
		{"GET", "/envs", "right", 200},
		{"POST", stat, "", 401},
		{"POST", list, "wrong", 401},
		{"POST", list, "right", 200},
		{"POST", "/init", "", 401},
		{"GET", "/files?path=/etc/passwd", "", 401},
		{"POST", "/files?path=x", "", 401},
		{"GET", "/nope", "", 401},
		{"GET", "/nope", "right", 404},
		{"POST", "/freeze", "right", 404},
		{"GET", "//health", "", 401},
	} {
		resp, text := h.do(test.method, test.path, "{}", "X-Access-Token", test.token, "Content-Type", asJSON)
		if resp.StatusCode != test.status {
			t.Errorf("%s %s with %q: %s %s", test.method, test.path, test.token, resp.Status, text)
		}
		if test.status == 401 && !strings.HasPrefix(test.path, "/files") && text != refusal {
			t.Errorf("%s %s: refused with %s", test.method, test.path, text)
		}
		if got := resp.Header.Get(IncarnationHeader); got != "7" {
			t.Errorf("%s %s: incarnation %q", test.method, test.path, got)
		}
	}
	resp, text := h.do("GET", "/health", "")
	if resp.Header.Get("Content-Length") != "" || text != "" {
		t.Errorf("the health answer has a body: %v", resp.Header)
	}
}

func TestOpenWithoutToken(t *testing.T) {
	h := newHarness(t, env.Identity{SandboxID: "i1", EnvVars: map[string]string{"A": "b"}})
	if resp, text := h.do("GET", "/envs", ""); resp.StatusCode != 200 || text != `{"A":"b","E2B_SANDBOX":"true","E2B_SANDBOX_ID":"i1"}` {
		t.Errorf("%s %s", resp.Status, text)
	}
}

// What SDKs rely on in unary answers (e2b-wire C.4).
func TestUnaryShape(t *testing.T) {
	h := newHarness(t, env.Identity{})
	resp, text := h.do("POST", stat, `{"path":"/nope","unknown":1}`, "Content-Type", asJSON, "Accept-Encoding", "gzip")
	if resp.StatusCode != 404 || text != connectErr || resp.Header.Get("Content-Type") != asJSON {
		t.Errorf("%s %v %s", resp.Status, resp.Header, text)
	}
	resp, text = h.do("POST", stat, `{"path":"/"}`, "Content-Type", asJSON, "Accept-Encoding", "gzip")
	if resp.StatusCode != 200 || resp.Header.Get("Content-Encoding") != "" {
		t.Errorf("%s %v", resp.Status, resp.Header)
	}
	var answer struct{ Entry map[string]any }
	if err := json.Unmarshal([]byte(text), &answer); err != nil || answer.Entry["type"] != "FILE_TYPE_DIRECTORY" {
		t.Errorf("%v %s", err, text)
	}
	if _, ok := answer.Entry["modifiedTime"].(string); !ok {
		t.Errorf("modifiedTime in %s", text)
	}
	if _, ok := answer.Entry["size"].(string); !ok && answer.Entry["size"] != nil {
		t.Errorf("size is no string in %s", text)
	}
	// Snake case and enum numbers are understood too.
	resp, text = h.do("POST", "/process.Process/SendSignal", `{"process":{"pid":999999},"signal":9}`, "Content-Type", asJSON)
	if resp.StatusCode != 404 || text != `{"code":"not_found","message":"process with pid 999999 not found"}` {
		t.Errorf("%s %s", resp.Status, text)
	}
	for _, body := range []string{`{"path":`, `{"path":5}`, `[]`} {
		if resp, text = h.do("POST", stat, body, "Content-Type", asJSON); resp.StatusCode != 400 || !strings.Contains(text, `"invalid_argument"`) {
			t.Errorf("%s: %s %s", body, resp.Status, text)
		}
	}
}

func TestInit(t *testing.T) {
	h := newHarness(t, env.Identity{EnvVars: map[string]string{"OLD": "1"}, DefaultWorkdir: "/w"})
	post := func(body string) (int, string) {
		resp, text := h.do("POST", "/init", body)
		return resp.StatusCode, text
	}
	if code, text := post(`{"envVars":{"A":"1"},"accessToken":"t","timestamp":"2026-01-02T03:04:05Z","defaultUser":"bob","lifecycleID":"x"}`); code != 204 {
		t.Fatal(code, text)
	}
	id := h.store.Get()
	if len(id.EnvVars) != 1 || id.EnvVars["A"] != "1" || id.AccessToken != "t" || id.DefaultUser != "bob" || id.DefaultWorkdir != "/w" {
		t.Errorf("%+v", id)
	}
	if want := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC); !h.clock.Equal(want) {
		t.Errorf("clock %v", h.clock)
	}
	for body, want := range map[string]struct {
		code int
		text string
	}{
		``:                                      {401, "unauthorized"},
		`{"accessToken":"other"}`:               {401, "unauthorized"},
		`{"accessToken":"t"}`:                   {204, ""},
		`{"accessToken":"t","envVars":{"B":2}}`: {400, "malformed"},
		`{`:                                     {400, "malformed"},
		`{"accessToken":"t","hyperloopIP":"1"}`: {400, "hyperloopIP is not supported"},
		`{"accessToken":"t","volumeMounts":[{}]}`: {400, "volumeMounts is not supported"},
		`{"accessToken":"t","caBundle":"pem"}`:    {400, "caBundle is not supported"},
	} {
		if code, text := post(body); code != want.code || !strings.Contains(text, want.text) {
			t.Errorf("%s: %d %s", body, code, text)
		}
	}
	if h.store.Get().EnvVars["A"] != "1" {
		t.Error("a refused call changed the environment")
	}
}

func TestBrowsers(t *testing.T) {
	h := newHarness(t, env.Identity{AccessToken: "t"})
	resp, _ := h.do("OPTIONS", list, "", "Origin", "https://x", "Access-Control-Request-Method", "POST",
		"Access-Control-Request-Headers", "x-access-token,connect-protocol-version")
	if resp.StatusCode != 204 || resp.Header.Get("Access-Control-Allow-Origin") != "*" ||
		!strings.Contains(resp.Header.Get("Access-Control-Allow-Headers"), "x-access-token") {
		t.Errorf("preflight: %s %v", resp.Status, resp.Header)
	}
	if resp, _ = h.do("OPTIONS", list, ""); resp.StatusCode != 401 {
		t.Errorf("OPTIONS that is no preflight: %s", resp.Status)
	}
	if resp, _ = h.do("GET", "/health", ""); resp.Header.Get("Access-Control-Allow-Origin") != "*" {
		t.Errorf("%v", resp.Header)
	}
}
