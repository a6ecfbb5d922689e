package process

import (
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/rs/zerolog"
	"google.golang.org/protobuf/proto"

	"torpor/api/envd"
	"torpor/api/envd/envdconnect"
	"torpor/guest/env"
)

// patience bounds a test that hangs; nothing is measured against it.
const patience = 60 * time.Second

// accounts are the users of the test's guest; all of them are who runs the test.
type accounts map[string]env.User

func (a accounts) Lookup(name string) (env.User, error) {
	u, ok := a[name]
	if !ok {
		return env.User{}, &env.UnknownUserError{Name: name}
	}
	return u, nil
}

type harness struct {
	t       *testing.T
	client  envdconnect.ProcessClient
	service *Service
	url     string
	home    string
}

func newHarness(t *testing.T, id env.Identity) *harness {
	t.Helper()
	home := t.TempDir()
	me := env.User{Name: "tester", UID: uint32(os.Getuid()), GID: uint32(os.Getgid()), Home: home}
	if id.DefaultUser == "" {
		id.DefaultUser = "tester"
	}
	store, err := env.NewStore("", id, accounts{"tester": me})
	if err != nil {
		t.Fatal(err)
	}
	service, err := New(Config{Store: store, Log: zerolog.New(zerolog.NewTestWriter(t)), KeepUser: os.Geteuid() != 0})
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle(envdconnect.NewProcessHandler(service))
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	client := envdconnect.NewProcessClient(server.Client(), server.URL, connect.WithProtoJSON())
	return &harness{t: t, client: client, service: service, url: server.URL, home: home}
}

func (h *harness) context() context.Context {
	ctx, cancel := context.WithTimeout(h.t.Context(), patience)
	h.t.Cleanup(cancel)
	return ctx
}

func sh(script string) *envd.StartRequest {
	return &envd.StartRequest{
		Process: &envd.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c", script}}, Stdin: proto.Bool(false),
	}
}

// run is what a finished stream held.
type run struct {
	pid                 uint32
	stdout, stderr, pty string
	end                 *envd.ProcessEvent_EndEvent
	keepalives          int
	err                 error
}

func (r *run) add(ev *envd.ProcessEvent) {
	switch e := ev.GetEvent().(type) {
	case *envd.ProcessEvent_Start:
		r.pid = e.Start.GetPid()
	case *envd.ProcessEvent_Data:
		r.stdout += string(e.Data.GetStdout())
		r.stderr += string(e.Data.GetStderr())
		r.pty += string(e.Data.GetPty())
	case *envd.ProcessEvent_End:
		r.end = e.End
	case *envd.ProcessEvent_Keepalive:
		r.keepalives++
	}
}

// start begins a process and reads its stream up to the start event.
func (h *harness) start(ctx context.Context, req *connect.Request[envd.StartRequest]) (*connect.ServerStreamForClient[envd.StartResponse], *run) {
	h.t.Helper()
	stream, err := h.client.Start(ctx, req)
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { _ = stream.Close() })
	r := &run{}
	if !stream.Receive() {
		r.err = stream.Err()
		return stream, r
	}
	if r.add(stream.Msg().GetEvent()); r.pid == 0 {
		h.t.Fatalf("first event is %v, not start", stream.Msg())
	}
	return stream, r
}

func (h *harness) finish(stream *connect.ServerStreamForClient[envd.StartResponse], r *run) *run {
	for stream.Receive() {
		r.add(stream.Msg().GetEvent())
	}
	if r.err == nil {
		r.err = stream.Err()
	}
	return r
}

func (h *harness) run(req *envd.StartRequest) *run {
	h.t.Helper()
	stream, r := h.start(h.context(), connect.NewRequest(req))
	return h.finish(stream, r)
}

func byPid(pid uint32) *envd.ProcessSelector {
	return &envd.ProcessSelector{Selector: &envd.ProcessSelector_Pid{Pid: pid}}
}
