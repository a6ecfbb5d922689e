package rest

import (
	"context"
	"encoding/base64"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	"torpor/api/apierr"
	"torpor/api/e2b"
	"torpor/api/envd"
	"torpor/api/envd/envdconnect"
	"torpor/api/hop"
	"torpor/controlplane/reply"
	"torpor/controlplane/store"
)

// maxOutput bounds each of stdout and stderr of an exec answer; what is over is dropped and said.
const maxOutput = 1 << 20

// defaultExecTimeout is in seconds.
const defaultExecTimeout = 60

type execRequest struct {
	Cmd     string            `json:"cmd"`
	Cwd     string            `json:"cwd"`
	EnvVars map[string]string `json:"envVars"`
	User    string            `json:"user"`
	Timeout *int64            `json:"timeout"` // seconds
}

type execResult struct {
	ExitCode  int32  `json:"exitCode"` // of the shell; -1 if it has none (ended by a signal, or by the timeout)
	Stdout    string `json:"stdout"`
	Stderr    string `json:"stderr"`
	Truncated bool   `json:"truncated"`
	TimedOut  bool   `json:"timedOut"`
}

// exec runs one shell command, waking the sandbox first, for clients without an SDK.
func (a *API) exec(w http.ResponseWriter, r *http.Request) error {
	var req execRequest
	if err := decode(r, &req); err != nil {
		return err
	}
	seconds := int64(defaultExecTimeout)
	if req.Timeout != nil {
		seconds = *req.Timeout
	}
	switch {
	case req.Cmd == "" || strings.Contains(req.Cmd, "\x00"):
		return apierr.New(apierr.BadRequest, "field \"cmd\" must be a shell command")
	case strings.ContainsAny(req.User, ":\x00"):
		return apierr.New(apierr.BadRequest, "field \"user\" must be a user name")
	}
	if err := errors.Join(a.checkTimeout(seconds), checkEnv(req.EnvVars)); err != nil {
		return err
	}
	row, err := a.find(r)
	if err != nil {
		return err
	}
	if _, _, err := a.wake(r, row.ID, 0, a.node.Resume); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(r.Context(), time.Duration(seconds)*time.Second)
	defer cancel()
	result, err := a.run(ctx, row, req)
	if err != nil {
		return err
	}
	reply.JSON(w, http.StatusOK, result)
	return nil
}

// run has envd start the command and collects its output until it ends or ctx does.
func (a *API) run(ctx context.Context, row store.Sandbox, req execRequest) (*execResult, error) {
	transport := a.dataPlane.Transport()
	defer transport.CloseIdleConnections()
	client := envdconnect.NewProcessClient(&http.Client{Transport: transport}, "http://sandbox", connect.WithProtoJSON())

	stdin := false
	start := connect.NewRequest(&envd.StartRequest{
		Process: &envd.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-l", "-c", req.Cmd}, Envs: req.EnvVars},
		Stdin:   &stdin,
	})
	if req.Cwd != "" {
		start.Msg.Process.Cwd = &req.Cwd
	}
	header := start.Header()
	header.Set(hop.SandboxHeader, row.ID)
	header.Set(hop.PortHeader, strconv.Itoa(e2b.EnvdPort))
	if row.AccessToken != "" {
		header.Set("X-Access-Token", row.AccessToken)
	}
	if req.User != "" {
		header.Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(req.User+":")))
	}

	result := &execResult{ExitCode: -1}
	stream, err := client.Start(ctx, start)
	if err != nil {
		return execFailed(ctx, result, err)
	}
	defer stream.Close()
	var stdout, stderr output
	ended := false
	for stream.Receive() {
		switch e := stream.Msg().GetEvent().GetEvent().(type) {
		case *envd.ProcessEvent_Data:
			stdout.add(e.Data.GetStdout())
			stderr.add(e.Data.GetStderr())
		case *envd.ProcessEvent_End:
			ended = true
			result.ExitCode = e.End.GetExitCode()
		}
	}
	result.Stdout, result.Stderr = stdout.String(), stderr.String()
	result.Truncated = stdout.truncated || stderr.truncated
	if ended {
		return result, nil
	}
	return execFailed(ctx, result, stream.Err())
}

// execFailed tells a command that ran out of time (which has a result) from one whose fate is not known.
func execFailed(ctx context.Context, result *execResult, err error) (*execResult, error) {
	code := connect.CodeOf(err)
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded) || code == connect.CodeDeadlineExceeded:
		result.TimedOut = true
		return result, nil
	case code == connect.CodeInvalidArgument || code == connect.CodeNotFound || code == connect.CodeUnauthenticated:
		return nil, apierr.New(apierr.BadRequest, "the command could not be started: %w", err)
	case err == nil:
		err = errors.New("the stream ended without the command's exit code")
	}
	return nil, apierr.New(apierr.NotReady, "the sandbox went away while the command ran; it may have been carried out: %w", err)
}

// output collects up to maxOutput bytes.
type output struct {
	strings.Builder
	truncated bool
}

func (o *output) add(p []byte) {
	if room := maxOutput - o.Len(); len(p) > room {
		p, o.truncated = p[:room], true
	}
	o.Write(p)
}
