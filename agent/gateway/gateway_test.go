package gateway_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"

	"torpor/agent/gateway"
	"torpor/api/apierr"
)

func TestRequestReachesTheGuestAsItCame(t *testing.T) {
	var got *http.Request
	var body string
	_, url := start(t, func(w http.ResponseWriter, r *http.Request) {
		got = r
		raw, _ := io.ReadAll(r.Body)
		body = string(raw)
		w.Header().Set("Torpor-Incarnation", "7")
		w.Header().Set("X-Own", "guest")
		w.WriteHeader(http.StatusTeapot)
		io.WriteString(w, "answer")
	})
	r := request(t, "POST", url+"/a%2Fb//c?x=1;y&z=%zz", "8080")
	r.Host = "8080-abc.example.test"
	r.Header.Set("X-Forwarded-For", "192.0.2.1")
	r.Header.Set("Torpor-Evil", "x")
	r.Body = io.NopCloser(strings.NewReader("hello"))
	res := do(t, r)
	raw, _ := io.ReadAll(res.Body)

	if res.StatusCode != http.StatusTeapot || string(raw) != "answer" || res.Header.Get("X-Own") != "guest" {
		t.Errorf("answer: %d %q %v", res.StatusCode, raw, res.Header)
	}
	if got.RequestURI != "/a%2Fb//c?x=1;y&z=%zz" || got.Host != "8080-abc.example.test" || body != "hello" {
		t.Errorf("request: %q %q %q", got.RequestURI, got.Host, body)
	}
	if got.Header.Get("X-Forwarded-For") != "192.0.2.1" || got.Header.Get("User-Agent") == "" {
		t.Errorf("header changed: %v", got.Header)
	}
	for _, h := range []http.Header{got.Header, res.Header} {
		for name := range h {
			if strings.HasPrefix(name, "Torpor-") {
				t.Errorf("%s crossed the gateway", name)
			}
		}
	}
	if !strings.HasPrefix(res.Header.Get("Server-Timing"), "wake;dur=") {
		t.Errorf("Server-Timing: %q", res.Header.Get("Server-Timing"))
	}
}

func TestManyRequestsWakeOnceAndAreEachDeliveredOnce(t *testing.T) {
	const requests = 8
	var mu sync.Mutex
	seen := map[string]int{}
	n, url := start(t, func(w http.ResponseWriter, r *http.Request) {
		raw, _ := io.ReadAll(r.Body)
		mu.Lock()
		seen[string(raw)]++
		mu.Unlock()
	})
	n.ready, n.hold = false, make(chan struct{})
	var wg sync.WaitGroup
	for i := range requests {
		wg.Go(func() {
			r := request(t, "POST", url+"/run", "49983")
			r.Body = io.NopCloser(strings.NewReader(string(rune('a' + i)))) // streamed: its length is not known
			if res, err := http.DefaultTransport.RoundTrip(r); err != nil || res.StatusCode != http.StatusOK {
				t.Errorf("request %d: %v %v", i, res, err)
			}
		})
	}
	close(n.hold)
	wg.Wait()
	n.held.Wait()
	if wakes, dials, released := n.count(); wakes != 1 || dials != requests || released != requests {
		t.Errorf("%d wakes, %d dials, %d releases", wakes, dials, released)
	}
	for body, times := range seen {
		if times != 1 {
			t.Errorf("body %q delivered %d times", body, times)
		}
	}
	if len(seen) != requests {
		t.Errorf("%d bodies seen", len(seen))
	}
}

func TestUnauthorisedCannotTellPausedFromUnknown(t *testing.T) {
	n, url := start(t, func(http.ResponseWriter, *http.Request) { t.Error("the guest was reached") })
	n.ready = false
	for name, change := range map[string]func(*http.Request){
		"no token":    func(r *http.Request) { r.Header.Del("X-Access-Token") },
		"wrong token": func(r *http.Request) { r.Header.Set("X-Access-Token", token+"x") },
		"health":      func(r *http.Request) { r.Header.Del("X-Access-Token"); r.Method = "GET"; r.URL.Path = "/health" },
		"bad signature": func(r *http.Request) {
			r.Header.Del("X-Access-Token")
			r.URL.Path, r.URL.RawQuery = "/files", "signature=v1_x"
		},
		"signature elsewhere": func(r *http.Request) { r.Header.Set("X-Access-Token", ""); r.URL.RawQuery = "signature=v1_x" },
	} {
		var answers []string
		for _, id := range []string{sandboxID, "iunknownunknownunknow"} {
			r := request(t, "POST", url+"/process.Process/Start", "49983")
			r.Header.Set(gateway.SandboxHeader, id)
			change(r)
			res := do(t, r)
			raw, _ := io.ReadAll(res.Body)
			res.Header.Del("Date")
			head, _ := json.Marshal(res.Header)
			answers = append(answers, strings.ReplaceAll(string(head)+string(raw), id, "ID"))
			if res.StatusCode != http.StatusBadGateway {
				t.Errorf("%s: status %d", name, res.StatusCode)
			}
		}
		if answers[0] != answers[1] {
			t.Errorf("%s: paused and unknown differ:\n%s\n%s", name, answers[0], answers[1])
		}
	}
	if wakes, _, _ := n.count(); wakes != 0 {
		t.Error("an unauthorised request woke the sandbox")
	}
}

func TestRunningSandboxAnswersTheUnauthorisedItself(t *testing.T) {
	_, url := start(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) })
	r := request(t, "POST", url+"/process.Process/List", "49983")
	r.Header.Del("X-Access-Token")
	if res := do(t, r); res.StatusCode != http.StatusUnauthorized {
		t.Errorf("status %d", res.StatusCode)
	}
}

func TestErrorsOfAcquire(t *testing.T) {
	n, url := start(t, func(http.ResponseWriter, *http.Request) { t.Error("the guest was reached") })
	for _, c := range []struct {
		err        error
		status     int
		body       string
		retryAfter string
	}{
		{
			apierr.New(apierr.NotReady, "not awake within 60 s").With("running", "starting"), 503,
			`{"code":503,"message":"service unavailable: not awake within 60 s","error":"not_ready","retryable":true,"sandboxID":"` + sandboxID + `","vm":"running","envd":"starting"}`, "1",
		},
		{apierr.New(apierr.NotFound, "x"), 502, `{"sandboxId":"` + sandboxID + `","message":"The sandbox was not found","code":502}`, ""},
		{apierr.New(apierr.SandboxBroken, "memory file damaged"), 500, `{"code":500,"message":"memory file damaged","error":"sandbox_broken","retryable":false,"sandboxID":"` + sandboxID + `"}`, ""},
		{errors.New("surprise"), 500, `{"code":500,"message":"surprise","error":"internal","retryable":false,"sandboxID":"` + sandboxID + `"}`, ""},
	} {
		n.fail = c.err
		res := do(t, request(t, "GET", url+"/health", "49983"))
		raw, _ := io.ReadAll(res.Body)
		if res.StatusCode != c.status || string(raw) != c.body || res.Header.Get("Retry-After") != c.retryAfter {
			t.Errorf("%v: %d %s Retry-After=%q", c.err, res.StatusCode, raw, res.Header.Get("Retry-After"))
		}
	}
}

func TestClosedPorts(t *testing.T) {
	n, url := start(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	for _, c := range []struct {
		name, port string
		errs       []error
		status     int
		body       string
	}{
		{"a user's port is closed", "8080", []error{errRefused}, 502, `{"sandboxId":"` + sandboxID + `","message":"The sandbox is running but port is not open","port":8080,"code":502}`},
		{"envd is dialled again", "49983", []error{errRefused, errRefused, errors.New("reset")}, 204, ""},
		{"envd stays away", "49983", manyErrors(200), 503, `"error":"not_ready"`},
		{"the path to a user's port fails", "8080", []error{errors.New("vsock gone")}, 503, `"vm":"running","envd":"unresponsive"`},
	} {
		n.mu.Lock()
		n.dialErrs = c.errs
		n.mu.Unlock()
		res := do(t, request(t, "GET", url+"/health", c.port))
		raw, _ := io.ReadAll(res.Body)
		if res.StatusCode != c.status || !strings.Contains(string(raw), c.body) {
			t.Errorf("%s: %d %s", c.name, res.StatusCode, raw)
		}
	}
}

func manyErrors(n int) []error {
	errs := make([]error, n)
	for i := range errs {
		errs[i] = errRefused
	}
	return errs
}

func TestInternalRoutesAreHidden(t *testing.T) {
	n, url := start(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	for path, want := range map[string]int{
		"/init": 404, "/freeze": 404, "/unfreeze": 404, "/collapse": 404, "/fsfreeze": 404, "/fsthaw": 404, "/upgrade": 404,
		"/init/": 404, "//init": 404, "/x/../init": 404, "/%69nit": 404, "/initial": 204, "/health": 204,
	} {
		res := do(t, request(t, "POST", url+path, "49983"))
		raw, _ := io.ReadAll(res.Body)
		if res.StatusCode != want || (want == 404 && !strings.Contains(string(raw), `"path":"`)) {
			t.Errorf("%s: %d %s", path, res.StatusCode, raw)
		}
	}
	before := func() int { _, d, _ := n.count(); return d }()
	if res := do(t, request(t, "POST", url+"/init", "8080")); res.StatusCode != 204 || before == 0 {
		t.Errorf("a user's /init: %d", res.StatusCode)
	}
}

func TestMissingTargetIs400(t *testing.T) {
	_, url := start(t, func(http.ResponseWriter, *http.Request) { t.Error("the guest was reached") })
	for _, c := range [][2]string{{"", "80"}, {"i1", ""}, {"a-b", "80"}, {"i1", "0"}, {"i1", "65536"}, {"i1", "x"}} {
		r := request(t, "GET", url, c[1])
		r.Header.Set(gateway.SandboxHeader, c[0])
		if res := do(t, r); res.StatusCode != http.StatusBadRequest {
			t.Errorf("%v: %d", c, res.StatusCode)
		}
	}
}

func TestPeopleGetAPageProgramsGetJSON(t *testing.T) {
	_, url := start(t, func(http.ResponseWriter, *http.Request) {})
	for _, c := range []struct {
		name   string
		header map[string]string
		json   bool
	}{
		{"browser", map[string]string{"User-Agent": "Mozilla/5.0"}, false},
		{"navigation", map[string]string{"User-Agent": "Mozilla/5.0", "Sec-Fetch-Mode": "navigate", "X-Requested-With": "x"}, false},
		{"fetch", map[string]string{"User-Agent": "Mozilla/5.0", "Sec-Fetch-Mode": "cors"}, true},
		{"xhr", map[string]string{"User-Agent": "Mozilla/5.0", "X-Requested-With": "XMLHttpRequest"}, true},
		{"accepts json", map[string]string{"User-Agent": "Chrome", "Accept": "application/json"}, true},
		{"accepts both", map[string]string{"User-Agent": "Chrome", "Accept": "text/html, application/json"}, false},
		{"program", map[string]string{"User-Agent": "e2b-js-sdk/2.51.0"}, true},
	} {
		r := request(t, "GET", url, "80")
		r.Header.Set(gateway.SandboxHeader, "iunknown")
		for k, v := range c.header {
			r.Header.Set(k, v)
		}
		res := do(t, r)
		if got := strings.HasPrefix(res.Header.Get("Content-Type"), "application/json"); got != c.json || res.StatusCode != 502 {
			t.Errorf("%s: %d %s", c.name, res.StatusCode, res.Header.Get("Content-Type"))
		}
	}
}

func TestClientThatLeavesFreesTheHold(t *testing.T) {
	n, url := start(t, func(http.ResponseWriter, *http.Request) { t.Error("the guest was reached") })
	n.hold = make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	r := request(t, "GET", url, "80").WithContext(ctx)
	gone := make(chan error, 1)
	go func() { _, err := http.DefaultTransport.RoundTrip(r); gone <- err }()
	cancel()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestWebSocketEchoAndAbort(t *testing.T) {
	n, url := start(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "websocket" {
			t.Errorf("no upgrade: %v", r.Header)
		}
		conn, buf, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		io.Copy(conn, buf)
	})
	conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	r := request(t, "GET", url+"/ws", "8080")
	r.Header.Set("Connection", "Upgrade")
	r.Header.Set("Upgrade", "websocket")
	if err := r.Write(conn); err != nil {
		t.Fatal(err)
	}
	in := bufio.NewReader(conn)
	res, err := http.ReadResponse(in, r)
	if err != nil || res.StatusCode != http.StatusSwitchingProtocols {
		t.Fatal(res, err)
	}
	for _, msg := range []string{"one\n", "two\n"} {
		io.WriteString(conn, msg)
		if got, err := in.ReadString('\n'); got != msg || err != nil {
			t.Fatalf("%q %v", got, err)
		}
	}
	close(n.done)
	if _, err := in.ReadByte(); err == nil {
		t.Error("the socket outlived the sandbox")
	}
}
