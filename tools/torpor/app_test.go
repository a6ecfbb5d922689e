package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"connectrpc.com/connect"

	"torpor/api/envd"
	"torpor/api/envd/envdconnect"
)

const testKey = "e2b_0000000000000000000000000000000000000001"

// fakePlane answers as the control plane and as one sandbox's envd, and records what was asked.
type fakePlane struct {
	envdconnect.UnimplementedProcessHandler
	mu    sync.Mutex
	asked []string
	start func(*envd.StartRequest, *connect.ServerStream[envd.StartResponse]) error
	input chan []byte // what the command was sent; closed by CloseStdin
}

// requests returns what was asked until now, a line each.
func (f *fakePlane) requests() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return strings.Join(f.asked, "\n")
}

func newPlane(t *testing.T) (*fakePlane, *httptest.Server) {
	t.Helper()
	f := &fakePlane{input: make(chan []byte, 16)}
	mux := http.NewServeMux()
	path, handler := envdconnect.NewProcessHandler(f)
	mux.Handle(path, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("E2b-Sandbox-Id") != "i1" || r.Header.Get("E2b-Sandbox-Port") != "49983" || r.Header.Get("X-Access-Token") != "tok" {
			http.Error(w, "not found", http.StatusBadGateway)
			return
		}
		handler.ServeHTTP(w, r)
	}))
	json200 := func(body string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, body) }
	}
	const state = `{"sandboxID":"i1","incarnation":7,"public":"running","vm":{"state":"running"},"envd":{"state":"ready"},"endAt":"2030-01-01T00:00:00Z"}`
	mux.HandleFunc("GET /v2/sandboxes", func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("nextToken") == "" {
			w.Header().Set("X-Next-Token", "2")
			io.WriteString(w, `[{"sandboxID":"i1","templateID":"base","metadata":{"user_id":"u"}},{"sandboxID":"igone"}]`)
			return
		}
		io.WriteString(w, `[{"sandboxID":"i2","templateID":"base"}]`)
	})
	mux.HandleFunc("GET /sandboxes/i1", json200(`{"sandboxID":"i1","envdAccessToken":"tok","state":"running"}`))
	mux.HandleFunc("GET /v1/sandboxes/i1/state", func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, state)
		if r.URL.Query().Get("watch") == "true" {
			io.WriteString(w, "\n"+strings.ReplaceAll(state, "running", "paused"))
		}
	})
	mux.HandleFunc("GET /v1/sandboxes/i2/state", json200(`{"sandboxID":"i2","public":"paused","vm":{"state":"paused","reason":"timeout"},"envd":{"state":"absent"}}`))
	mux.HandleFunc("POST /sandboxes/i1/pause", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	mux.HandleFunc("POST /sandboxes/i2/pause", func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusConflict)
		io.WriteString(w, `{"code":409,"message":"i2 is paused already","error":"already_paused"}`)
	})
	mux.HandleFunc("POST /v2/sandboxes/i2/connect", func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusCreated)
		io.WriteString(w, `{"sandboxID":"i2"}`)
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusNotFound)
		fmt.Fprintf(w, `{"code":404,"message":"no such thing: %s","error":"not_found"}`, r.URL.Path)
	})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		f.asked = append(f.asked, r.Method+" "+r.URL.RequestURI())
		f.mu.Unlock()
		if key := r.Header.Get("X-Api-Key"); key != testKey && r.Header.Get("X-Access-Token") == "" {
			w.WriteHeader(http.StatusUnauthorized)
			io.WriteString(w, `{"code":401,"message":"the API key is missing or wrong","error":"unauthorized"}`)
			return
		}
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(srv.Close)
	return f, srv
}

// Start implements the process service.
func (f *fakePlane) Start(_ context.Context, req *connect.Request[envd.StartRequest], out *connect.ServerStream[envd.StartResponse]) error {
	return f.start(req.Msg, out)
}

// SendInput implements the process service.
func (f *fakePlane) SendInput(_ context.Context, req *connect.Request[envd.SendInputRequest]) (*connect.Response[envd.SendInputResponse], error) {
	f.input <- req.Msg.GetInput().GetStdin()
	return connect.NewResponse(&envd.SendInputResponse{}), nil
}

// CloseStdin implements the process service.
func (f *fakePlane) CloseStdin(context.Context, *connect.Request[envd.CloseStdinRequest]) (*connect.Response[envd.CloseStdinResponse], error) {
	close(f.input)
	return connect.NewResponse(&envd.CloseStdinResponse{}), nil
}

func sendStart(out *connect.ServerStream[envd.StartResponse]) error {
	return send(out, &envd.ProcessEvent{Event: &envd.ProcessEvent_Start{Start: &envd.ProcessEvent_StartEvent{Pid: 5}}})
}

func sendOut(out *connect.ServerStream[envd.StartResponse], stdout, stderr string) error {
	if stdout != "" {
		data := &envd.ProcessEvent_DataEvent{Output: &envd.ProcessEvent_DataEvent_Stdout{Stdout: []byte(stdout)}}
		if err := send(out, &envd.ProcessEvent{Event: &envd.ProcessEvent_Data{Data: data}}); err != nil {
			return err
		}
	}
	if stderr == "" {
		return nil
	}
	data := &envd.ProcessEvent_DataEvent{Output: &envd.ProcessEvent_DataEvent_Stderr{Stderr: []byte(stderr)}}
	return send(out, &envd.ProcessEvent{Event: &envd.ProcessEvent_Data{Data: data}})
}

func sendEnd(out *connect.ServerStream[envd.StartResponse], end *envd.ProcessEvent_EndEvent) error {
	return send(out, &envd.ProcessEvent{Event: &envd.ProcessEvent_End{End: end}})
}

func send(out *connect.ServerStream[envd.StartResponse], ev *envd.ProcessEvent) error {
	return out.Send(&envd.StartResponse{Event: ev})
}

// result is what a command line left behind.
type result struct {
	code           int
	stdout, stderr string
}

func runApp(t *testing.T, env map[string]string, stdin string, args ...string) result {
	t.Helper()
	if env == nil {
		env = map[string]string{}
	}
	if env["XDG_STATE_HOME"] == "" {
		env["XDG_STATE_HOME"] = t.TempDir()
	}
	var stdout, stderr bytes.Buffer
	a := &app{stdin: strings.NewReader(stdin), stdout: &stdout, stderr: &stderr, env: func(k string) string { return env[k] }}
	code := a.run(t.Context(), args)
	return result{code, stdout.String(), stderr.String()}
}

func envFor(srv *httptest.Server) map[string]string {
	return map[string]string{"E2B_API_URL": srv.URL, "E2B_API_KEY": testKey}
}

func TestPsShowsBothTruths(t *testing.T) {
	_, srv := newPlane(t)
	got := runApp(t, envFor(srv), "", "ps", "--json")
	var rows []row
	if err := json.Unmarshal([]byte(got.stdout), &rows); err != nil || got.code != 0 {
		t.Fatalf("%+v: %v", got, err)
	}
	if len(rows) != 2 {
		t.Fatalf("%d rows: the second page or the vanished sandbox was mistaken: %+v", len(rows), rows)
	}
	if r := rows[0]; r.VM.State != "running" || r.Envd.State != "ready" || r.Incarnation != 7 || r.Metadata["user_id"] != "u" {
		t.Errorf("row 0: %+v", r)
	}
	if r := rows[1]; r.VM.State != "paused" || r.VM.Reason != "timeout" || r.Envd.State != "absent" || r.Public != "paused" {
		t.Errorf("row 1: %+v", r)
	}
	table := runApp(t, envFor(srv), "", "ps")
	if !strings.Contains(table.stdout, `user_id="u"`) || !strings.Contains(table.stdout, "absent") {
		t.Errorf("table:\n%s", table.stdout)
	}
}

func TestErrorsAreOneSentence(t *testing.T) {
	_, srv := newPlane(t)
	wrongKey := envFor(srv)
	wrongKey["E2B_API_KEY"] = "e2b_bad"
	nobody := map[string]string{"E2B_API_URL": "http://127.0.0.1:1"}
	cases := []struct {
		name string
		env  map[string]string
		args []string
		want string
	}{
		{"wrong key", wrongKey, []string{"ps"}, "the API key is missing or wrong"},
		{"nothing up", nobody, []string{"ps"}, "nothing answers at http://127.0.0.1:1"},
		{"unknown sandbox", envFor(srv), []string{"pause", "inone"}, "no such thing"},
		{"an id is escaped", envFor(srv), []string{"pause", "a/b"}, "no such thing"},
		{"pause of a paused one", envFor(srv), []string{"pause", "i2"}, "i2 is paused already"},
		{"unknown flag", nil, []string{"ps", "--frob"}, "--frob"},
		{"unknown command", nil, []string{"frob"}, "frob"},
		{"missing id", nil, []string{"pause"}, "1 arg"},
		{"bad env", envFor(srv), []string{"exec", "i1", "-e", "X", "--", "true"}, "NAME=VALUE"},
		{"bad listen", nil, []string{"up", "--native", "--listen", "3000"}, "ADDRESS:PORT"},
		{"bad slow factor", nil, []string{"up", "--native", "--slow-factor", "0"}, "1 to 100"},
		{"detach alone", nil, []string{"up", "--detach"}, "--native"},
		{"timeout", envFor(srv), []string{"resume", "i2", "--timeout", "0s"}, "at least 1s"},
		{"env before up", nil, []string{"env"}, "torpor up"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			got := runApp(t, c.env, "", c.args...)
			if got.code != 1 || !strings.Contains(got.stderr, c.want) || strings.Count(strings.TrimSpace(got.stderr), "\n") != 0 {
				t.Errorf("got code %d and %q, want 1 and one line with %q", got.code, got.stderr, c.want)
			}
			if got.stdout != "" {
				t.Errorf("stdout %q", got.stdout)
			}
		})
	}
}

func TestExecPassesThrough(t *testing.T) {
	cases := []struct {
		name  string
		start func(*envd.StartRequest, *connect.ServerStream[envd.StartResponse]) error
		want  result
	}{
		{"output and code", func(req *envd.StartRequest, out *connect.ServerStream[envd.StartResponse]) error {
			args := strings.Join(req.GetProcess().GetArgs(), " ")
			if req.GetStdin() || req.GetProcess().GetCmd() != "/bin/bash" || args != `-l -c exec "$@" torpor ls -l` {
				return fmt.Errorf("asked to run %v with stdin %v", req.GetProcess(), req.GetStdin())
			}
			sendStart(out)
			sendOut(out, "out", "err")
			return sendEnd(out, &envd.ProcessEvent_EndEvent{ExitCode: 3, Exited: true})
		}, result{3, "out", "err"}},
		{"killed", func(_ *envd.StartRequest, out *connect.ServerStream[envd.StartResponse]) error {
			sendStart(out)
			return sendEnd(out, &envd.ProcessEvent_EndEvent{ExitCode: -1, Status: "signal: killed"})
		}, result{137, "", ""}},
		{"the stream breaks off", func(_ *envd.StartRequest, out *connect.ServerStream[envd.StartResponse]) error {
			sendOut(out, "half", "")
			return connect.NewError(connect.CodeUnavailable, fmt.Errorf("the guest died"))
		}, result{1, "half", "torpor: the command's output broke off: the guest died\n"}},
		{"no end event is no success", func(_ *envd.StartRequest, out *connect.ServerStream[envd.StartResponse]) error {
			return sendStart(out)
		}, result{1, "", "torpor: the command's output ended without an exit code\n"}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			plane, srv := newPlane(t)
			plane.start = c.start
			if got := runApp(t, envFor(srv), "", "exec", "i1", "--", "ls", "-l"); got != c.want {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
		})
	}
}

func TestExecFeedsStdin(t *testing.T) {
	plane, srv := newPlane(t)
	plane.start = func(req *envd.StartRequest, out *connect.ServerStream[envd.StartResponse]) error {
		if !req.GetStdin() {
			return fmt.Errorf("stdin was not asked for")
		}
		sendStart(out)
		var got []byte
		for p := range plane.input {
			got = append(got, p...)
		}
		sendOut(out, strings.ToUpper(string(got)), "")
		return sendEnd(out, &envd.ProcessEvent_EndEvent{Exited: true})
	}
	if got := runApp(t, envFor(srv), "some words", "exec", "-i", "i1", "--", "tr a-z A-Z"); got != (result{0, "SOME WORDS", ""}) {
		t.Errorf("%+v", got)
	}
}

func TestStateAndWatch(t *testing.T) {
	_, srv := newPlane(t)
	if got := runApp(t, envFor(srv), "", "state", "i1"); got.code != 0 || !strings.Contains(got.stdout, `"incarnation": 7`) {
		t.Errorf("%+v", got)
	}
	got := runApp(t, envFor(srv), "", "state", "--watch", "i1")
	if lines := strings.Split(strings.TrimSpace(got.stdout), "\n"); got.code != 0 || len(lines) != 2 || !strings.Contains(lines[1], "paused") {
		t.Errorf("%+v", got)
	}
}

func TestPauseAllIsContentWithPausedOnes(t *testing.T) {
	plane, srv := newPlane(t)
	var stderr bytes.Buffer
	a := &app{stderr: &stderr, env: func(string) string { return "" }, apiURL: srv.URL, apiKey: testKey}
	a.env = func(k string) string { return map[string]string{"XDG_STATE_HOME": t.TempDir()}[k] }
	c, err := a.client()
	if err != nil {
		t.Fatal(err)
	}
	if err := a.pauseAll(t.Context(), c, headerBudget); err != nil {
		t.Error(err)
	}
	if got := plane.requests(); !strings.Contains(got, "/sandboxes/i1/pause") || !strings.Contains(got, "state=running") {
		t.Errorf("asked:\n%s", got)
	}
	// In the list's order, so by one writer: the pauses themselves overlap.
	if got := stderr.String(); got != "pausing i1\npausing igone\npausing i2\n" {
		t.Errorf("told:\n%s", got)
	}
}

func TestCredentials(t *testing.T) {
	_, srv := newPlane(t)
	env := map[string]string{"XDG_STATE_HOME": t.TempDir()}
	a := &app{stdout: io.Discard, env: func(k string) string { return env[k] }}
	if err := a.announce(srv.URL, testKey); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(env["XDG_STATE_HOME"], "torpor", "credentials.json")
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v %v: the key must be its owner's only", info, err)
	}
	if got := runApp(t, env, "", "ps"); got.code != 0 {
		t.Errorf("ps with saved credentials: %+v", got)
	}
	if got := runApp(t, env, "", "env"); got.stdout != "export E2B_API_URL="+srv.URL+"\nexport E2B_SANDBOX_URL="+srv.URL+"\nexport E2B_API_KEY="+testKey+"\n" {
		t.Errorf("%+v", got)
	}
	if err := a.dropCredentials("http://another"); err != nil {
		t.Error(err)
	}
	if err := a.dropCredentials(srv.URL); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(file); err == nil {
		t.Error("they outlived `torpor down`")
	}
	os.WriteFile(file, []byte("{"), 0o600)
	if got := runApp(t, env, "", "ps"); got.code != 1 || !strings.Contains(got.stderr, "damaged") {
		t.Errorf("damaged file: %+v", got)
	}
}
