package edge_test

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"torpor/controlplane/edge"
	"torpor/controlplane/fakeagent"
	"torpor/controlplane/fleet"
	"torpor/controlplane/store"
)

const token = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

// door is an edge between a fake REST handler and a fake gateway.
type door struct {
	t       *testing.T
	url     string
	socket  string
	gateway *httptest.Server
	agent   *fakeagent.Agent
}

// open serves an edge with one sandbox, i1, and a gateway that answers with handler.
func open(t *testing.T, handler http.HandlerFunc) *door {
	t.Helper()
	dir := t.TempDir()
	s, err := store.Open(t.Context(), filepath.Join(dir, "db"))
	if err != nil {
		t.Fatal(err)
	}
	for id, tok := range map[string]string{"i1": token, "iopen": ""} {
		if err := s.Insert(t.Context(), store.Sandbox{ID: id, TemplateID: "base", AccessToken: tok, CreatedAt: time.Now()}); err != nil {
			t.Fatal(err)
		}
	}
	d := &door{t: t, socket: filepath.Join(dir, "g.sock"), agent: fakeagent.Start(t)}
	d.agent.Add(fakeagent.Ready("i1", time.Minute))
	d.agent.Add(fakeagent.Ready("iopen", time.Minute))
	node := fleet.NewNode(fleet.Config{Socket: d.agent.Socket, Patience: 100 * time.Millisecond}, zerolog.Nop())
	d.gateway = d.listen(handler)
	rest := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "REST "+r.URL.Path) })
	dp := fleet.DataPlane{Socket: d.socket, Patience: 2 * time.Second}
	server := httptest.NewServer(edge.New("box.test:8443", rest, s, node, dp, zerolog.Nop()))
	d.url = server.URL
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
		node.Close()
		s.Close()
	})
	return d
}

// listen serves a gateway on the door's socket.
func (d *door) listen(handler http.HandlerFunc) *httptest.Server {
	d.t.Helper()
	listener, err := net.Listen("unix", d.socket)
	if err != nil {
		d.t.Fatal(err)
	}
	g := &httptest.Server{Listener: listener, Config: &http.Server{Handler: handler}}
	g.Start()
	d.t.Cleanup(func() { g.CloseClientConnections(); g.Close() })
	return g
}

// do sends a request; host, if not empty, is its Host.
func (d *door) do(method, host, path string, header map[string]string) *http.Response {
	d.t.Helper()
	r, err := http.NewRequestWithContext(d.t.Context(), method, d.url+path, nil)
	if err != nil {
		d.t.Fatal(err)
	}
	r.Host = host
	for k, v := range header {
		r.Header.Set(k, v)
	}
	res, err := http.DefaultTransport.RoundTrip(r)
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() { res.Body.Close() })
	return res
}

func text(res *http.Response) string {
	raw, _ := io.ReadAll(res.Body)
	return string(raw)
}

// signed is the query of a signed URL, made here from the protocol's definition (e2b-wire A.8).
func signed(path, operation, tok string) string {
	sum := sha256.Sum256([]byte(path + ":" + operation + "::" + tok))
	return "/files?path=" + url.QueryEscape(path) + "&signature=" + url.QueryEscape("v1_"+base64.RawStdEncoding.EncodeToString(sum[:]))
}

func TestWhatIsForWhom(t *testing.T) {
	d := open(t, func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, r.Header.Get("Torpor-Sandbox")+":"+r.Header.Get("Torpor-Port")+" "+r.URL.Path)
	})
	pair := func(id, port string) map[string]string {
		return map[string]string{"E2b-Sandbox-Id": id, "E2b-Sandbox-Port": port}
	}
	for _, c := range []struct {
		name, method, host, path string
		header                   map[string]string
		status                   int
		want                     string
	}{
		{"nothing", "GET", "", "/v2/sandboxes", nil, 200, "REST /v2/sandboxes"},
		{"a key", "GET", "", "/files", map[string]string{"X-API-KEY": "k", "X-Access-Token": token}, 200, "REST /files"},
		{"header pair", "POST", "", "/process.Process/Start", pair("i1", "49983"), 200, "i1:49983 /process.Process/Start"},
		{"header pair before host name", "GET", "80-iother.localhost", "/", pair("i1", "8080"), 200, "i1:8080 /"},
		{"header pair with a key", "GET", "", "/x", map[string]string{"E2b-Sandbox-Id": "i1", "E2b-Sandbox-Port": "1", "X-API-KEY": "k"}, 200, "i1:1 /x"},
		{"only the id", "GET", "", "/", map[string]string{"E2b-Sandbox-Id": "i1"}, 400, "Invalid sandbox port\n"},
		{"only the port", "GET", "", "/", map[string]string{"E2b-Sandbox-Port": "80"}, 400, "Invalid sandbox ID\n"},
		{"bad id", "GET", "", "/", pair("a-b", "80"), 400, "Invalid sandbox ID\n"},
		{"bad port", "GET", "", "/", pair("i1", "65536"), 400, "Invalid sandbox port\n"},
		{"port 0", "GET", "", "/", pair("i1", "0"), 400, "Invalid sandbox port\n"},
		{"localhost name", "GET", "8080-iabc.localhost:3000", "/a", nil, 200, "iabc:8080 /a"},
		{"domain name", "GET", "8080-iabc.box.test:8443", "/a", nil, 200, "iabc:8080 /a"},
		{"domain name, other port and case", "GET", "8080-IABC.Box.Test.", "/a", nil, 200, "iabc:8080 /a"},
		{"historic client id", "GET", "8080-iabc-6532622b.box.test", "/a", nil, 200, "iabc:8080 /a"},
		{"name with a bad port", "GET", "99999-iabc.box.test", "/", nil, 400, "Invalid sandbox port\n"},
		{"name with a bad id", "GET", "80-i_x.box.test", "/", nil, 400, "Invalid sandbox ID\n"},
		{"another name", "GET", "api.box.test", "/v1/health", nil, 200, "REST /v1/health"},
		{"another name with a dash", "GET", "my-api.box.test", "/v1/health", nil, 200, "REST /v1/health"},
		{"another domain", "GET", "80-iabc.else.test", "/", nil, 200, "REST /"},
		{"the shared name", "POST", "sandbox.box.test:8443", "/x", pair("i1", "49983"), 200, "i1:49983 /x"},
		{"a token alone", "POST", "", "/process.Process/List", map[string]string{"X-Access-Token": token}, 200, "i1:49983 /process.Process/List"},
		{"a signature to read", "GET", "", signed("a b+c.txt", "read", token), nil, 200, "i1:49983 /files"},
		{"a signature to write", "POST", "", signed("", "write", token), nil, 200, "i1:49983 /files"},
	} {
		res := d.do(c.method, c.host, c.path, c.header)
		if got := text(res); res.StatusCode != c.status || got != c.want {
			t.Errorf("%s: %d %q, want %d %q", c.name, res.StatusCode, got, c.status, c.want)
		}
	}
	for name, res := range map[string]*http.Response{
		"a stranger's token":     d.do("POST", "", "/process.Process/List", map[string]string{"X-Access-Token": "x" + token}),
		"an empty token's":       d.do("GET", "", signed("p", "read", ""), nil),
		"a stranger's signature": d.do("GET", "", signed("p", "read", "x"+token), nil),
		"for the other method":   d.do("POST", "", signed("p", "read", token), nil),
	} {
		got := text(res) // the gateway decides, on an id that is nobody's
		if id, rest, _ := strings.Cut(got, ":"); id == "i1" || id == "iopen" || len(id) != 21 || !strings.HasPrefix(rest, "49983 ") {
			t.Errorf("%s: %q", name, got)
		}
	}
}

func TestTheGatewaySeesTheClientsRequestAndNoForgedTarget(t *testing.T) {
	var got *http.Request
	d := open(t, func(w http.ResponseWriter, r *http.Request) {
		got = r
		w.Header().Set("Torpor-Incarnation", "3")
		w.Header().Set("Server-Timing", "wake;dur=1")
	})
	res := d.do("GET", "8080-i1.localhost", "/a%2Fb?x=1;y&z=%zz", map[string]string{
		"Torpor-Sandbox": "iforged", "torpor-other": "x", "X-Forwarded-For": "192.0.2.1", "X-Access-Token": "keep",
	})
	if got.RequestURI != "/a%2Fb?x=1;y&z=%zz" || got.Host != "8080-i1.localhost" || got.Header.Get("X-Access-Token") != "keep" || got.Header.Get("X-Forwarded-For") != "192.0.2.1" {
		t.Errorf("%s %s %v", got.RequestURI, got.Host, got.Header)
	}
	if v := got.Header["Torpor-Sandbox"]; len(v) != 1 || v[0] != "i1" || got.Header.Get("Torpor-Other") != "" {
		t.Errorf("forged: %v", got.Header)
	}
	if res.Header.Get("Torpor-Incarnation") != "" || res.Header.Get("Server-Timing") == "" {
		t.Errorf("%v", res.Header)
	}
}

func TestPreflightTouchesNothing(t *testing.T) {
	d := open(t, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "guest") })
	ask := map[string]string{"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "e2b-sandbox-id,x-access-token"}
	for _, host := range []string{"", "49983-i1.localhost", "49983-iunknown.localhost"} {
		res := d.do("OPTIONS", host, "/files", ask)
		if res.StatusCode != 204 || res.Header.Get("Access-Control-Allow-Origin") != "*" || res.Header.Get("Access-Control-Allow-Headers") != "e2b-sandbox-id,x-access-token" || text(res) != "" {
			t.Errorf("%q: %d %v", host, res.StatusCode, res.Header)
		}
	}
	if res := d.do("OPTIONS", "8080-i1.localhost", "/", ask); text(res) != "guest" {
		t.Error("a user's port answers its own preflights")
	}
	if res := d.do("OPTIONS", "", "/x", nil); text(res) != "REST /x" {
		t.Error("OPTIONS alone is no preflight")
	}
}

func TestStreamsBothWaysAndAborts(t *testing.T) {
	die := make(chan struct{})
	d := open(t, func(w http.ResponseWriter, r *http.Request) {
		c := http.NewResponseController(w)
		c.EnableFullDuplex()
		c.Flush()
		line, _ := bufio.NewReader(r.Body).ReadString('\n')
		io.WriteString(w, "echo "+line)
		c.Flush()
		<-die
		conn, _, err := c.Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		conn.Close()
	})
	body, feed := io.Pipe()
	r, _ := http.NewRequestWithContext(t.Context(), "POST", d.url, body)
	r.Header.Set("E2b-Sandbox-Id", "i1")
	r.Header.Set("E2b-Sandbox-Port", "49983")
	res, err := http.DefaultTransport.RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	io.WriteString(feed, "one\n")
	in := bufio.NewReader(res.Body)
	if line, err := in.ReadString('\n'); line != "echo one\n" {
		t.Fatal(line, err)
	}
	close(die)
	if _, err := in.ReadByte(); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a cut stream ended with %v", err)
	}
	feed.Close()
}

func TestClientThatLeavesCutsTheGatewaysRequest(t *testing.T) {
	cut := make(chan struct{})
	d := open(t, func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).Flush()
		<-r.Context().Done()
		close(cut)
	})
	ctx, cancel := context.WithCancel(t.Context())
	r, _ := http.NewRequestWithContext(ctx, "GET", d.url, nil)
	r.Host = "80-i1.localhost"
	res, err := http.DefaultTransport.RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	cancel()
	<-cut
}

func TestWebSocket(t *testing.T) {
	d := open(t, func(w http.ResponseWriter, r *http.Request) {
		conn, buf, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		io.CopyN(conn, buf, 5)
	})
	conn, err := net.Dial("tcp", strings.TrimPrefix(d.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	io.WriteString(conn, "GET / HTTP/1.1\r\nHost: 80-i1.localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	in := bufio.NewReader(conn)
	res, err := http.ReadResponse(in, nil)
	if err != nil || res.StatusCode != 101 {
		t.Fatal(res, err)
	}
	io.WriteString(conn, "frame")
	if got, err := io.ReadAll(in); string(got) != "frame" || err != nil {
		t.Errorf("%q %v", got, err)
	}
}

func TestGatewayAwayIsWaitedFor(t *testing.T) {
	d := open(t, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "old") })
	d.gateway.CloseClientConnections()
	d.gateway.Close()
	answered := make(chan string, 1)
	go func() { answered <- text(d.do("GET", "80-i1.localhost", "/", nil)) }()
	d.listen(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "new") })
	if got := <-answered; got != "new" {
		t.Errorf("%q", got)
	}
}

func TestGatewayThatStaysAwayIsA503(t *testing.T) {
	d := open(t, nil)
	d.gateway.Close()
	res := d.do("POST", "", "/process.Process/Start", map[string]string{"E2b-Sandbox-Id": "i1", "E2b-Sandbox-Port": "49983"})
	got := text(res)
	if res.StatusCode != 503 || !strings.Contains(got, `"error":"node_unreachable"`) || res.Header.Get("Retry-After") == "" || !strings.Contains(got, "service unavailable") {
		t.Errorf("%d %s %v", res.StatusCode, got, res.Header)
	}
}

// A connection that will not be used again is said so in the answer: a client that reuses it for a POST would otherwise lose
// that request, since nobody may send a POST twice. The gateway answers early, as it does for a sandbox that sleeps.
func TestNoConnectionEndsUnannounced(t *testing.T) {
	for name, handler := range map[string]http.HandlerFunc{
		"body unread": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) },
		"body read":   func(_ http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) },
	} {
		t.Run(name, func(t *testing.T) {
			d := open(t, handler)
			client := &http.Client{Transport: &http.Transport{MaxConnsPerHost: 1}}
			t.Cleanup(client.CloseIdleConnections)
			post := func(path string, header map[string]string, body io.Reader) {
				r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, d.url+path, body)
				if err != nil {
					t.Fatal(err)
				}
				for k, v := range header {
					r.Header.Set(k, v)
				}
				res, err := client.Do(r)
				if err != nil {
					t.Fatalf("POST %s: %v", path, err)
				}
				_, _ = io.Copy(io.Discard, res.Body)
				res.Body.Close()
			}
			toSandbox := map[string]string{"E2b-Sandbox-Id": "i1", "E2b-Sandbox-Port": "49983"}
			for range 500 {
				post("/process.Process/List", toSandbox, strings.NewReader("{}"))
				post("/sandboxes/i1/connect", nil, strings.NewReader(`{"timeout":1}`))
				// Of unknown length, as the JS SDK sends it.
				post("/process.Process/List", toSandbox, struct{ io.Reader }{strings.NewReader("{}")})
				post("/sandboxes/i1/connect", nil, strings.NewReader(`{"timeout":1}`))
			}
		})
	}
}
