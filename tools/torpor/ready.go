package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/ttrpc"

	"torpor/api/agentpb"
	"torpor/tools/rest"
)

// retryEvery is the beat at which a daemon that does not listen yet, or a template being built, is looked at again.
const retryEvery = 250 * time.Millisecond

// readyBudget bounds the whole start: the first one boots a machine to make the template.
const readyBudget = 4 * time.Minute

// waitReady returns when this host can create sandboxes: the API answers and the agent has a template.
func (a *app) waitReady(ctx context.Context, o upOptions) error {
	ctx, cancel := context.WithTimeout(ctx, readyBudget*time.Duration(o.slowFactor))
	defer cancel()
	api := &rest.Client{API: o.localURL()}
	err := retry(ctx, func() (bool, error) {
		_, err := api.Health(ctx)
		return err == nil, err
	})
	if err != nil {
		return fmt.Errorf("the control plane does not answer at %s: %w", o.localURL(), err)
	}
	conn, err := net.Dial("unix", o.agentSock())
	if err != nil {
		return fmt.Errorf("reaching the agent: %w", err)
	}
	client := ttrpc.NewClient(conn)
	defer client.Close()
	agent, said := agentpb.NewAgentClient(client), ""
	err = retry(ctx, func() (bool, error) {
		answer, err := agent.Templates(ctx, &agentpb.TemplatesRequest{})
		if err != nil {
			return false, err
		}
		state, why := "absent", ""
		for _, t := range answer.GetTemplates() {
			state, why = t.GetState(), t.GetError()
		}
		switch state {
		case "ready":
			return true, nil
		case "failed":
			return false, final{fmt.Errorf("the template could not be built: %s", why)}
		}
		if state != said {
			said = state
			fmt.Fprintf(a.stderr, "template: %s\n", state)
		}
		return false, errors.New("the template is not built yet")
	})
	if err != nil {
		return fmt.Errorf("waiting for the template: %w", err)
	}
	return nil
}

// final marks an error that trying again will not mend.
type final struct{ error }

// retry calls try until it says done, fails for good, or ctx ends; then the last error is told.
func retry(ctx context.Context, try func() (done bool, err error)) error {
	tick := time.NewTicker(retryEvery)
	defer tick.Stop()
	for {
		done, err := try()
		if done {
			return nil
		}
		var f final
		if errors.As(err, &f) {
			return f.error
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			if cause := context.Cause(ctx); !errors.Is(cause, context.DeadlineExceeded) {
				return cause
			}
			return fmt.Errorf("gave up: %w", err)
		}
	}
}

// upDetached starts `torpor up --native` as a process of its own and returns when that one is ready or has failed.
func (a *app) upDetached(ctx context.Context, o upOptions) error {
	if pid, err := holder(o.lockFile()); err != nil {
		return err
	} else if pid != 0 {
		return a.announceLocal(o)
	}
	if _, err := os.Stat(filepath.Join(o.images, "base")); errors.Is(err, fs.ErrNotExist) {
		if _, err := a.buildImages(ctx, "--out", filepath.Join(o.images, "base")); err != nil {
			return err
		}
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("finding this program: %w", err)
	}
	readEnd, writeEnd, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("making the readiness pipe: %w", err)
	}
	defer readEnd.Close()
	cmd := exec.Command(self, "up", "--native", "--ready-fd", "3", "--listen", o.listen, "--domain", o.domain,
		"--slow-factor", strconv.Itoa(o.slowFactor), "--data", o.data, "--run", o.run, "--images", o.images)
	cmd.Env = os.Environ()
	cmd.ExtraFiles = []*os.File{writeEnd}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C here is not for it
	err = cmd.Start()
	writeEnd.Close()
	if err != nil {
		return fmt.Errorf("starting the supervisor: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Signal(syscall.SIGTERM) }) // gone already is as good
	defer stop()
	said, err := io.ReadAll(readEnd)
	if err != nil {
		return fmt.Errorf("waiting for the supervisor: %w", err)
	}
	words := strings.TrimSpace(string(said))
	if words == readyWord {
		return a.announceLocal(o)
	}
	_ = cmd.Wait() // it said why, or ended without; its exit status adds nothing
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case words == "":
		return errors.New("the supervisor ended before it was ready; see its log below the data directory")
	default:
		return errors.New(words)
	}
}

const readyWord = "ready"

// readyReporter returns what tells the waiting parent, once, that the host is up (nil) or why not.
func (a *app) readyReporter(o upOptions) func(error) {
	if o.readyFD == 0 {
		return func(error) {}
	}
	syscall.CloseOnExec(o.readyFD) // the daemons must not keep the parent waiting
	pipe := os.NewFile(uintptr(o.readyFD), "ready")
	return func(err error) {
		if pipe == nil {
			return
		}
		words := readyWord
		if err != nil {
			words = err.Error()
		}
		fmt.Fprintln(pipe, words)
		pipe.Close()
		pipe = nil
	}
}

// plainLine turns a JSON log line into words; any other line stays as it is.
func plainLine(line []byte) string {
	var log struct {
		Message string `json:"message"`
		Error   string `json:"error"`
	}
	if !bytes.HasPrefix(line, []byte("{")) || json.Unmarshal(line, &log) != nil {
		return string(line)
	}
	switch {
	case log.Error == "":
		return log.Message
	case log.Message == "":
		return log.Error
	}
	return log.Message + ": " + log.Error
}
