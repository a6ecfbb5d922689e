package rest

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"connectrpc.com/connect"

	"torpor/api/envd"
	"torpor/api/envd/envdconnect"
)

// terminateBudget bounds the goodbye to a command whose caller has gone.
const terminateBudget = 5 * time.Second

// Command is one process to run in a sandbox, in the SDKs' way: through a login shell.
type Command struct {
	Argv   []string          // run as it is; with one element it is a shell line
	User   string            // empty: the sandbox's default user
	Cwd    string            // empty: the user's home
	Env    map[string]string // beside the sandbox's own
	Stdin  io.Reader         // nil: no input
	Stdout io.Writer
	Stderr io.Writer
}

// Exec runs a command and returns its exit code. An error means that it is not known how the command ended. When ctx ends the
// process is told to stop (SIGTERM).
func (c *Client) Exec(ctx context.Context, sb Sandbox, cmd Command) (int, error) {
	process := envdconnect.NewProcessClient(c.client(), c.sandboxBase(), connect.WithProtoJSON(), connect.WithInterceptors(identify{sb, cmd.User}))
	config := &envd.ProcessConfig{Cmd: "/bin/bash", Args: shellArgs(cmd.Argv), Envs: cmd.Env}
	if cmd.Cwd != "" {
		config.Cwd = &cmd.Cwd
	}
	useStdin := cmd.Stdin != nil
	stream, err := process.Start(ctx, connect.NewRequest(&envd.StartRequest{Process: config, Stdin: &useStdin}))
	if err != nil {
		return 0, fmt.Errorf("starting the command: %w", plain(err))
	}
	defer stream.Close()

	run := execution{process: process, cmd: cmd}
	for stream.Receive() {
		done, code, err := run.event(ctx, stream.Msg().GetEvent())
		if done || err != nil {
			return code, err
		}
	}
	if ctx.Err() != nil {
		run.terminate(ctx)
		return 0, ctx.Err()
	}
	if err := stream.Err(); err != nil {
		return 0, fmt.Errorf("the command's output broke off: %w", plain(err))
	}
	return 0, errors.New("the command's output ended without an exit code")
}

// Output runs a shell line and returns what it wrote to standard output; a non-zero exit is an error with its standard error.
func (c *Client) Output(ctx context.Context, sb Sandbox, line string) (string, error) {
	var stdout, stderr bytes.Buffer
	code, err := c.Exec(ctx, sb, Command{Argv: []string{line}, Stdout: &stdout, Stderr: &stderr})
	if err == nil && code != 0 {
		err = fmt.Errorf("%q exited with %d: %s", line, code, bytes.TrimSpace(stderr.Bytes()))
	}
	return stdout.String(), err
}

func shellArgs(argv []string) []string {
	if len(argv) == 1 {
		return []string{"-l", "-c", argv[0]}
	}
	return append([]string{"-l", "-c", `exec "$@"`, "torpor"}, argv...)
}

// execution is one running command.
type execution struct {
	process envdconnect.ProcessClient
	cmd     Command
	pid     uint32
}

func (x *execution) event(ctx context.Context, ev *envd.ProcessEvent) (done bool, code int, err error) {
	switch {
	case ev.GetStart() != nil:
		x.pid = ev.GetStart().GetPid()
		if x.cmd.Stdin != nil {
			go x.feed(ctx) // ends with the input, the command or ctx
		}
	case ev.GetData() != nil:
		if err := copyTo(x.cmd.Stdout, ev.GetData().GetStdout()); err != nil {
			return true, 0, err
		}
		return false, 0, copyTo(x.cmd.Stderr, ev.GetData().GetStderr())
	case ev.GetEnd() != nil:
		return true, exitCode(ev.GetEnd()), nil
	}
	return false, 0, nil
}

func (x *execution) feed(ctx context.Context) {
	buf := make([]byte, 32<<10)
	for {
		n, err := x.cmd.Stdin.Read(buf)
		if n > 0 {
			input := &envd.ProcessInput{Input: &envd.ProcessInput_Stdin{Stdin: buf[:n]}}
			if _, sendErr := x.process.SendInput(ctx, connect.NewRequest(&envd.SendInputRequest{Process: x.self(), Input: input})); sendErr != nil {
				return // the command has ended, and its end event tells
			}
		}
		if err != nil {
			_, _ = x.process.CloseStdin(ctx, connect.NewRequest(&envd.CloseStdinRequest{Process: x.self()})) // as above
			return
		}
	}
}

func (x *execution) terminate(ctx context.Context) {
	if x.pid == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), terminateBudget)
	defer cancel()
	req := &envd.SendSignalRequest{Process: x.self(), Signal: envd.Signal_SIGNAL_SIGTERM}
	_, _ = x.process.SendSignal(ctx, connect.NewRequest(req)) // best effort: the user is leaving
}

func (x *execution) self() *envd.ProcessSelector {
	return &envd.ProcessSelector{Selector: &envd.ProcessSelector_Pid{Pid: x.pid}}
}

// exitCode follows the shell: 128+n for a process ended by signal n, where envd names it.
func exitCode(end *envd.ProcessEvent_EndEvent) int {
	if end.GetExited() {
		return int(end.GetExitCode())
	}
	switch end.GetStatus() {
	case "signal: killed":
		return 128 + 9
	case "signal: terminated":
		return 128 + 15
	}
	return 255
}

func copyTo(w io.Writer, p []byte) error {
	if w == nil || len(p) == 0 {
		return nil
	}
	_, err := w.Write(p)
	return err
}

// plain takes the RPC code off an error's text where the message says it all.
func plain(err error) error {
	var ce *connect.Error
	if errors.As(err, &ce) && ce.Message() != "" {
		return errors.New(ce.Message())
	}
	return err
}

// identify puts the headers on that name the sandbox and authorise the call.
type identify struct {
	sb   Sandbox
	user string
}

func (i identify) set(h http.Header) {
	h.Set("E2b-Sandbox-Id", i.sb.SandboxID)
	h.Set("E2b-Sandbox-Port", "49983")
	if i.sb.AccessToken != "" {
		h.Set("X-Access-Token", i.sb.AccessToken)
	}
	if i.user != "" {
		h.Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(i.user+":")))
	}
}

// WrapUnary implements connect.Interceptor.
func (i identify) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		i.set(req.Header())
		return next(ctx, req)
	}
}

// WrapStreamingClient implements connect.Interceptor.
func (i identify) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		conn := next(ctx, spec)
		i.set(conn.RequestHeader())
		return conn
	}
}

// WrapStreamingHandler implements connect.Interceptor; this side handles nothing.
func (i identify) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

// Processes counts what envd runs: a cheap call that has to go all the way through the gateway, envd's authorisation and its RPC.
func (c *Client) Processes(ctx context.Context, sb Sandbox) (int, error) {
	process := envdconnect.NewProcessClient(c.client(), c.sandboxBase(), connect.WithProtoJSON(), connect.WithInterceptors(identify{sb: sb}))
	answer, err := process.List(ctx, connect.NewRequest(&envd.ListRequest{}))
	if err != nil {
		return 0, err
	}
	return len(answer.Msg.GetProcesses()), nil
}
