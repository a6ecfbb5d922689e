package rest_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"torpor/api/envd"
	"torpor/api/envd/envdconnect"
	"torpor/controlplane/rest"
)

// guest answers process.Start as the data plane of a sandbox would.
type guest struct {
	envdconnect.UnimplementedProcessHandler
	start  func(ctx context.Context, r *envd.StartRequest, send func(*envd.ProcessEvent) error) error
	header http.Header
}

func (g *guest) Start(ctx context.Context, r *connect.Request[envd.StartRequest], s *connect.ServerStream[envd.StartResponse]) error {
	g.header = r.Header()
	return g.start(ctx, r.Msg, func(e *envd.ProcessEvent) error { return s.Send(&envd.StartResponse{Event: e}) })
}

func (p *plane) serveGuest(g *guest, socket string) {
	p.t.Helper()
	mux := http.NewServeMux()
	mux.Handle(envdconnect.NewProcessHandler(g))
	listener, err := net.Listen("unix", socket)
	if err != nil {
		p.t.Fatal(err)
	}
	server := &httptest.Server{Listener: listener, Config: &http.Server{Handler: mux}}
	server.Start()
	p.t.Cleanup(func() { server.CloseClientConnections(); server.Close() })
}

func out(s string) *envd.ProcessEvent {
	return &envd.ProcessEvent{Event: &envd.ProcessEvent_Data{Data: &envd.ProcessEvent_DataEvent{Output: &envd.ProcessEvent_DataEvent_Stdout{Stdout: []byte(s)}}}}
}

func end(code int32) *envd.ProcessEvent {
	return &envd.ProcessEvent{Event: &envd.ProcessEvent_End{End: &envd.ProcessEvent_EndEvent{ExitCode: code, Exited: true}}}
}

func TestExec(t *testing.T) {
	p := newPlane(t, rest.Config{})
	id := p.create(`{"templateID":"base"}`)
	p.call("POST", "/sandboxes/"+id+"/pause", "")
	g := &guest{}
	p.serveGuest(g, filepath.Join(p.dir, "g.sock"))
	for _, c := range []struct {
		name, body string
		start      func(ctx context.Context, r *envd.StartRequest, send func(*envd.ProcessEvent) error) error
		status     int
		want       string
	}{
		{"real exit code", `{"cmd":"false","cwd":"/tmp","user":"root","envVars":{"A":"b"}}`, func(_ context.Context, r *envd.StartRequest, send func(*envd.ProcessEvent) error) error {
			if r.Process.Cmd != "/bin/bash" || strings.Join(r.Process.Args, " ") != "-l -c false" || r.Process.GetCwd() != "/tmp" || r.Process.Envs["A"] != "b" || r.GetStdin() {
				t.Errorf("%v", r)
			}
			return errors.Join(send(out("hi")), send(&envd.ProcessEvent{Event: &envd.ProcessEvent_Keepalive{}}), send(end(3)))
		}, 200, `{"exitCode":3,"stdout":"hi","stderr":"","truncated":false,"timedOut":false}`},
		{"too much output", `{"cmd":"yes"}`, func(_ context.Context, _ *envd.StartRequest, send func(*envd.ProcessEvent) error) error {
			for range 3 {
				if err := send(out(strings.Repeat("x", 600<<10))); err != nil {
					return err
				}
			}
			return send(end(0))
		}, 200, `,"stderr":"","truncated":true,"timedOut":false}`},
		{"out of time", `{"cmd":"sleep 9","timeout":1}`, func(ctx context.Context, _ *envd.StartRequest, send func(*envd.ProcessEvent) error) error {
			send(out("partial"))
			<-ctx.Done()
			return ctx.Err()
		}, 200, `{"exitCode":-1,"stdout":"partial","stderr":"","truncated":false,"timedOut":true}`},
		{"not startable", `{"cmd":"x","cwd":"/nope"}`, func(context.Context, *envd.StartRequest, func(*envd.ProcessEvent) error) error {
			return connect.NewError(connect.CodeInvalidArgument, errors.New("cwd '/nope' does not exist"))
		}, 400, `cwd '/nope' does not exist`},
		{"cut off", `{"cmd":"x"}`, func(_ context.Context, _ *envd.StartRequest, send func(*envd.ProcessEvent) error) error {
			send(out("partial"))
			panic(http.ErrAbortHandler)
		}, 503, `may have been carried out`},
		{"no exit code", `{"cmd":"x"}`, func(context.Context, *envd.StartRequest, func(*envd.ProcessEvent) error) error { return nil }, 503, `without the command's exit code`},
	} {
		g.start = c.start
		a := p.call("POST", "/v1/sandboxes/"+id+"/exec", c.body)
		if a.status != c.status || !strings.Contains(a.raw, c.want) {
			t.Errorf("%s: %d %.300s", c.name, a.status, a.raw)
		}
		if g.header.Get("Torpor-Sandbox") != id || g.header.Get("Torpor-Port") != "49983" || len(g.header.Get("X-Access-Token")) != 64 {
			t.Errorf("%s: %v", c.name, g.header)
		}
	}
	if a := p.call("GET", "/sandboxes/"+id, ""); a.body["state"] != "running" {
		t.Error("exec did not wake the sandbox")
	}
}
