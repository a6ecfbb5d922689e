package process

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"torpor/api/envd"
	"torpor/api/envd/envdconnect"
	"torpor/guest/env"
)

func TestEnds(t *testing.T) {
	h := newHarness(t, env.Identity{})
	for _, test := range []struct {
		script         string
		stdout, stderr string
		want           *envd.ProcessEvent_EndEvent
	}{
		{"echo out; echo err >&2", "out\n", "err\n", &envd.ProcessEvent_EndEvent{Exited: true, Status: "exit status 0"}},
		{"exit 7", "", "", &envd.ProcessEvent_EndEvent{ExitCode: 7, Exited: true, Status: "exit status 7", Error: proto.String("exit status 7")}},
		{"kill -9 $$", "", "", &envd.ProcessEvent_EndEvent{ExitCode: -1, Status: "signal: killed", Error: proto.String("signal: killed")}},
		{"kill -15 $$", "", "", &envd.ProcessEvent_EndEvent{ExitCode: -1, Status: "signal: terminated", Error: proto.String("signal: terminated")}},
		{"printf 'a\\377b'", "a\xffb", "", &envd.ProcessEvent_EndEvent{Exited: true, Status: "exit status 0"}},
		// A child that outlives the shell still writes: that output belongs to the run.
		{"(sleep 0.3; echo late) & echo early", "early\nlate\n", "", &envd.ProcessEvent_EndEvent{Exited: true, Status: "exit status 0"}},
	} {
		r := h.run(sh(test.script))
		if r.err != nil || r.stdout != test.stdout || r.stderr != test.stderr || !proto.Equal(r.end, test.want) {
			t.Errorf("%q: %+v", test.script, r)
		}
	}
}

func TestRefusedStarts(t *testing.T) {
	h := newHarness(t, env.Identity{})
	file := h.home + "/file"
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	cwd := func(dir string) *envd.StartRequest {
		req := sh("true")
		req.Process.Cwd = &dir
		return req
	}
	for _, test := range []struct {
		name, user, message string
		req                 *envd.StartRequest
		code                connect.Code
	}{
		{"cwd", "", "cwd '/nope' does not exist", cwd("/nope"), connect.CodeInvalidArgument},
		{"cwd is a file", "", "is not a directory", cwd("file"), connect.CodeInvalidArgument},
		{"cwd of another", "", "another user", cwd("~other"), connect.CodeInvalidArgument},
		{"user", "nobody-here", "invalid username: 'nobody-here'", sh("true"), connect.CodeUnauthenticated},
		{"empty", "", "cmd is empty", &envd.StartRequest{}, connect.CodeInvalidArgument},
		{"command", "", "not found in PATH", &envd.StartRequest{Process: &envd.ProcessConfig{Cmd: "no-such-command"}}, connect.CodeInvalidArgument},
		{"path", "", "no such file", &envd.StartRequest{Process: &envd.ProcessConfig{Cmd: "/no/such"}}, connect.CodeInvalidArgument},
		{"env", "", "cannot be set", &envd.StartRequest{Process: &envd.ProcessConfig{Cmd: "true", Envs: map[string]string{"A=B": ""}}}, connect.CodeInvalidArgument},
	} {
		req := connect.NewRequest(test.req)
		if test.user != "" {
			r, _ := http.NewRequest("POST", "/", nil)
			r.SetBasicAuth(test.user, "")
			req.Header().Set("Authorization", r.Header.Get("Authorization"))
		}
		_, r := h.start(h.context(), req)
		if connect.CodeOf(r.err) != test.code || !strings.Contains(fmt.Sprint(r.err), test.message) {
			t.Errorf("%s: %v", test.name, r.err)
		}
	}
}

func TestEnvironment(t *testing.T) {
	t.Setenv("OF_THE_DAEMON", "leaked")
	h := newHarness(t, env.Identity{SandboxID: "s1", EnvVars: map[string]string{"GLOBAL": "g", "BOTH": "g"}})
	req := &envd.StartRequest{Process: &envd.ProcessConfig{Cmd: "env", Envs: map[string]string{"BOTH": "r", "ONE": "r"}}, Stdin: proto.Bool(false)}
	want := []string{
		"BOTH=r", "E2B_SANDBOX=true", "E2B_SANDBOX_ID=s1", "GLOBAL=g", "HOME=" + h.home, "LOGNAME=tester", "ONE=r",
		"PATH=" + env.DefaultPath, "USER=tester", "",
	}
	if r := h.run(req); r.err != nil || r.stdout != strings.Join(want, "\n") {
		t.Errorf("environment %q, %v", r.stdout, r.err)
	}
	if r := h.run(sh("pwd")); r.stdout != h.home+"\n" {
		t.Errorf("default directory %q", r.stdout)
	}
}

func TestManyBytes(t *testing.T) {
	const size = 10 << 20
	h := newHarness(t, env.Identity{})
	stream, r := h.start(h.context(), connect.NewRequest(sh(fmt.Sprintf("head -c %d /dev/zero; exit 3", size))))
	got := 0
	for stream.Receive() {
		data := stream.Msg().GetEvent().GetData().GetStdout()
		got += len(data)
		if len(data) > pipeChunk || bytes.Count(data, []byte{0}) != len(data) {
			t.Fatalf("a chunk of %d bytes, or not what was written", len(data))
		}
		if r.end != nil {
			t.Error("data after end")
		}
		if e := stream.Msg().GetEvent().GetEnd(); e != nil {
			r.end = e
		}
	}
	if got != size || r.end.GetExitCode() != 3 || stream.Err() != nil {
		t.Errorf("%d bytes, %v, %v", got, r.end, stream.Err())
	}
}

func TestInput(t *testing.T) {
	h := newHarness(t, env.Identity{})
	ctx := h.context()
	stream, r := h.start(ctx, connect.NewRequest(&envd.StartRequest{Process: &envd.ProcessConfig{Cmd: "cat"}}))
	send := func(in *envd.ProcessInput) error {
		_, err := h.client.SendInput(ctx, connect.NewRequest(&envd.SendInputRequest{Process: byPid(r.pid), Input: in}))
		return err
	}
	stdin := func(s string) *envd.ProcessInput {
		return &envd.ProcessInput{Input: &envd.ProcessInput_Stdin{Stdin: []byte(s)}}
	}
	big := strings.Repeat("x", 1<<20)
	for _, s := range []string{"one\n", "", "ünï\x00\n", big} {
		if err := send(stdin(s)); err != nil {
			t.Fatal(err)
		}
	}
	if err := send(&envd.ProcessInput{Input: &envd.ProcessInput_Pty{}}); connect.CodeOf(err) != connect.CodeInternal {
		t.Errorf("pty input for a pipe: %v", err)
	}
	streamed := h.client.StreamInput(ctx)
	for _, msg := range []*envd.StreamInputRequest{
		{Event: &envd.StreamInputRequest_Start{Start: &envd.StreamInputRequest_StartEvent{Process: byPid(r.pid)}}},
		{Event: &envd.StreamInputRequest_Data{Data: &envd.StreamInputRequest_DataEvent{Input: stdin("s1 ")}}},
		{Event: &envd.StreamInputRequest_Keepalive{Keepalive: &envd.StreamInputRequest_KeepAlive{}}},
		{Event: &envd.StreamInputRequest_Data{Data: &envd.StreamInputRequest_DataEvent{Input: stdin("s2")}}},
	} {
		if err := streamed.Send(msg); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := streamed.CloseAndReceive(); err != nil {
		t.Fatal(err)
	}
	if _, err := h.client.CloseStdin(ctx, connect.NewRequest(&envd.CloseStdinRequest{Process: byPid(r.pid)})); err != nil {
		t.Fatal(err)
	}
	h.finish(stream, r)
	if want := "one\nünï\x00\n" + big + "s1 s2"; r.stdout != want || r.end.GetExitCode() != 0 {
		t.Errorf("%d bytes of %d, %v, %v", len(r.stdout), len(want), r.end, r.err)
	}
}

func TestNoInput(t *testing.T) {
	h := newHarness(t, env.Identity{})
	ctx := h.context()
	stream, r := h.start(ctx, connect.NewRequest(sh("cat; sleep 60")))
	_, err := h.client.SendInput(ctx, connect.NewRequest(&envd.SendInputRequest{
		Process: byPid(r.pid), Input: &envd.ProcessInput{Input: &envd.ProcessInput_Stdin{Stdin: []byte("x")}},
	}))
	if connect.CodeOf(err) != connect.CodeInternal {
		t.Errorf("input without stdin: %v", err)
	}
	_, err = h.client.CloseStdin(ctx, connect.NewRequest(&envd.CloseStdinRequest{Process: byPid(r.pid)}))
	if err == nil {
		t.Error("closed a stdin that is not there")
	}
	h.signal(r.pid, envd.Signal_SIGNAL_SIGKILL)
	h.finish(stream, r)
}

func (h *harness) signal(pid uint32, sig envd.Signal) error {
	_, err := h.client.SendSignal(h.context(), connect.NewRequest(&envd.SendSignalRequest{Process: byPid(pid), Signal: sig}))
	return err
}

// A killed process is reaped at once, its end does not wait for its children, and later calls do not find it.
func TestKill(t *testing.T) {
	h := newHarness(t, env.Identity{})
	stream, r := h.start(h.context(), connect.NewRequest(sh("echo $$; sleep 600 & wait")))
	if !stream.Receive() {
		t.Fatal(stream.Err())
	}
	if err := h.signal(r.pid, envd.Signal_SIGNAL_UNSPECIFIED); connect.CodeOf(err) != connect.CodeUnimplemented {
		t.Errorf("signal 0: %v", err)
	}
	if err := h.signal(r.pid, envd.Signal_SIGNAL_SIGKILL); err != nil {
		t.Fatal(err)
	}
	h.finish(stream, r)
	if r.end.GetStatus() != "signal: killed" || r.end.GetExitCode() != -1 || r.end.GetExited() {
		t.Errorf("end %v, %v", r.end, r.err)
	}
	if err := syscall.Kill(int(r.pid), 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("the process is still there: %v", err)
	}
	_ = syscall.Kill(-int(r.pid), syscall.SIGKILL) // the sleep
	if err := h.signal(r.pid, envd.Signal_SIGNAL_SIGKILL); connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("killing it again: %v", err)
	}
	// Its end can be asked for, late.
	again, err := h.client.Connect(h.context(), connect.NewRequest(&envd.ConnectRequest{Process: byPid(r.pid)}))
	if err != nil {
		t.Fatal(err)
	}
	var late run
	for again.Receive() {
		late.add(again.Msg().GetEvent())
	}
	if late.pid != r.pid || !proto.Equal(late.end, r.end) {
		t.Errorf("late Connect: %+v, %v", late, again.Err())
	}
}

func TestUnknownProcess(t *testing.T) {
	h := newHarness(t, env.Identity{})
	ctx := h.context()
	const pid = 999999
	errs := map[string]error{"SendSignal": h.signal(pid, envd.Signal_SIGNAL_SIGTERM)}
	_, errs["Update"] = h.client.Update(ctx, connect.NewRequest(&envd.UpdateRequest{Process: byPid(pid)}))
	_, errs["CloseStdin"] = h.client.CloseStdin(ctx, connect.NewRequest(&envd.CloseStdinRequest{Process: byPid(pid)}))
	_, errs["SendInput"] = h.client.SendInput(ctx, connect.NewRequest(&envd.SendInputRequest{Process: byPid(pid)}))
	stream, err := h.client.Connect(ctx, connect.NewRequest(&envd.ConnectRequest{Process: byPid(pid)}))
	if err == nil {
		for stream.Receive() {
		}
		err = stream.Err()
	}
	errs["Connect"] = err
	for rpc, err := range errs {
		if connect.CodeOf(err) != connect.CodeNotFound || !strings.Contains(err.Error(), "process with pid 999999 not found") {
			t.Errorf("%s: %v", rpc, err)
		}
	}
	if err := h.signal(0, 0); connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("pid 0: %v", err)
	}
}

// The deadline of Start ends the process and all it started, even if the client is long gone.
func TestDeadline(t *testing.T) {
	h := newHarness(t, env.Identity{})
	client := &http.Client{} // the Connect client has no header without a deadline of its own
	post := func(ctx context.Context) *http.Response {
		t.Helper()
		body := []byte(`{"process":{"cmd":"/bin/sh","args":["-c","sleep 600 & echo $!; wait"]},"stdin":false}`)
		frame := append([]byte{0, 0, 0, 0, byte(len(body))}, body...)
		r, _ := http.NewRequestWithContext(ctx, "POST", h.url+envdconnect.ProcessStartProcedure, bytes.NewReader(frame))
		r.Header.Set("Content-Type", "application/connect+json")
		r.Header.Set("Connect-Timeout-Ms", "300")
		resp, err := client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		return resp
	}
	resp := post(h.context())
	all, err := io.ReadAll(resp.Body)
	if err != nil || !bytes.Contains(all, []byte("deadline_exceeded")) || bytes.Contains(all, []byte(`"end"`)) {
		t.Errorf("stream %q, %v", all, err)
	}
	ctx, hangUp := context.WithCancel(h.context())
	resp = post(ctx)
	hangUp()
	_ = resp.Body.Close()
	h.eventually("the deadline passed, but processes are left", func() bool {
		h.service.mu.Lock()
		defer h.service.mu.Unlock()
		return len(h.service.running) == 0
	})
}

func (h *harness) eventually(what string, ok func() bool) {
	h.t.Helper()
	deadline := time.After(patience)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			h.t.Fatal(what)
		}
	}
}

// A client that leaves does not end the process, nor does its output block it.
func TestDisconnect(t *testing.T) {
	h := newHarness(t, env.Identity{})
	ctx, hangUp := context.WithCancel(h.context())
	done := h.home + "/done"
	_, r := h.start(ctx, connect.NewRequest(sh(fmt.Sprintf("sleep 0.2; head -c 3000000 /dev/zero; touch %s; sleep 600", done))))
	hangUp()
	h.eventually("output without a reader blocked the process", func() bool {
		_, err := os.Stat(done)
		return err == nil
	})
	list, err := h.client.List(h.context(), connect.NewRequest(&envd.ListRequest{}))
	if err != nil || len(list.Msg.GetProcesses()) != 1 || list.Msg.GetProcesses()[0].GetPid() != r.pid {
		t.Errorf("list %v, %v", list, err)
	}
	if err := h.signal(r.pid, envd.Signal_SIGNAL_SIGTERM); err != nil {
		t.Error(err)
	}
}
