package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"
)

// Times of supervision. They are about processes, not guests, and hold on slow hosts when multiplied by the slow factor.
const (
	stopGrace    = 20 * time.Second // from SIGTERM to SIGKILL of a daemon
	steadyAfter  = time.Minute      // a daemon that lived this long starts over with the shortest delay
	logRotateAt  = 16 << 20         // bytes; the older half of a log is one file back
	lastLineSize = 4 << 10          // bytes kept of a daemon's output to say why it ended
)

// restartDelays are the pauses before the first, second, … restart of a daemon that keeps dying; the last one repeats.
var restartDelays = []time.Duration{200 * time.Millisecond, time.Second, 5 * time.Second, 15 * time.Second, 30 * time.Second}

// daemon is one supervised program.
type daemon struct {
	name string
	path string
	args []string
	log  string
}

// daemons returns the two programs of a host in start order: the agent first, since the control plane asks it.
func (o *upOptions) daemons() ([]daemon, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("finding the daemons beside this program: %w", err)
	}
	bin := filepath.Dir(self)
	agent := []string{
		"--data", filepath.Join(o.data, "agent"), "--run", o.run, "--images", o.images,
		"--vmm", filepath.Join(bin, "torpor-vmm"), "--slow-factor", strconv.Itoa(o.slowFactor),
	}
	plane := []string{
		"--data", filepath.Join(o.data, "controlplane"), "--agent", o.agentSock(),
		"--gateway", filepath.Join(o.run, "gateway.sock"), "--listen", o.listen,
	}
	if o.domain != "" {
		plane = append(plane, "--domain", o.domain)
	}
	logs := filepath.Join(o.data, "log")
	out := []daemon{
		{"agent", filepath.Join(bin, "torpor-agent"), agent, filepath.Join(logs, "agent.log")},
		{"controlplane", filepath.Join(bin, "torpor-controlplane"), plane, filepath.Join(logs, "controlplane.log")},
	}
	for _, d := range append(out, daemon{name: "vmm", path: filepath.Join(bin, "torpor-vmm")}) {
		if _, err := os.Stat(d.path); err != nil {
			return nil, fmt.Errorf("the %s is missing (%w): build it with `make build`", d.name, err)
		}
	}
	return out, nil
}

// supervisor keeps daemons running.
type supervisor struct {
	log    zerolog.Logger
	delays []time.Duration
	grace  time.Duration
}

// run keeps the daemons running until ctx ends, then stops them, last started first. ready is called once; until it has
// returned nil a daemon that ends makes run fail with that daemon's own last words, since a start that does not work must be
// said and not repeated.
func (s *supervisor) run(ctx context.Context, daemons []daemon, ready func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	isUp := make(chan struct{})

	// Each daemon gets a context of its own, so that they can be stopped one after the other.
	var group errgroup.Group
	stops := make([]func(), 0, len(daemons))
	for _, d := range daemons {
		own, stop := context.WithCancel(context.WithoutCancel(ctx))
		done := make(chan struct{})
		group.Go(func() error {
			defer close(done)
			err := s.keep(own, d, isUp)
			if err != nil {
				cancel(err)
			}
			return err
		})
		stops = append(stops, func() { stop(); <-done })
	}
	err := ready(ctx)
	if err == nil {
		close(isUp)
		<-ctx.Done()
	}
	for i := len(stops) - 1; i >= 0; i-- {
		stops[i]()
	}
	if daemonErr := group.Wait(); daemonErr != nil {
		return daemonErr
	}
	return err
}

// keep runs one daemon again and again until ctx ends. Before isUp is closed its first end is final.
func (s *supervisor) keep(ctx context.Context, d daemon, isUp <-chan struct{}) error {
	// PR_SET_PDEATHSIG, set for the children, is about the thread that made them: it must live as long as they.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for tries := 0; ; tries++ {
		began := time.Now()
		err := s.once(ctx, d)
		if ctx.Err() != nil {
			return nil
		}
		select {
		case <-isUp:
		default:
			return err
		}
		if time.Since(began) >= steadyAfter {
			tries = 0
		}
		delay := s.delays[min(tries, len(s.delays)-1)]
		s.log.Warn().Str("daemon", d.name).Err(err).Dur("delay", delay).Msg("ended; starting it again")
		select {
		case <-time.After(delay):
		case <-ctx.Done():
			return nil
		}
	}
}

// once runs a daemon to its end. SIGTERM when ctx ends, SIGKILL after the grace. The error names how it ended.
func (s *supervisor) once(ctx context.Context, d daemon) error {
	out, err := rotated(d.log)
	if err != nil {
		return err
	}
	defer out.Close()
	last := &tail{max: lastLineSize}
	cmd := exec.CommandContext(ctx, d.path, d.args...)
	cmd.Stdout, cmd.Stderr = out, io.MultiWriter(out, last)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = s.grace
	// Should this supervisor be killed, its daemons stop too: whoever starts the next one finds the port free.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM, Setpgid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting the %s: %w", d.name, err)
	}
	s.log.Info().Str("daemon", d.name).Int("pid", cmd.Process.Pid).Msg("started")
	err = cmd.Wait()
	s.log.Info().Str("daemon", d.name).Int("pid", cmd.Process.Pid).Err(err).Msg("ended")
	if ctx.Err() != nil {
		return nil
	}
	if words := last.sentence(); words != "" {
		return fmt.Errorf("the %s stopped: %s", d.name, words)
	}
	if err == nil {
		err = errors.New("exit status 0")
	}
	return fmt.Errorf("the %s stopped without a word (%w); see %s", d.name, err, d.log)
}

// rotated opens a log for appending, after moving a long one one file back.
func rotated(path string) (*os.File, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("making the log directory: %w", err)
	}
	if info, err := os.Stat(path); err == nil && info.Size() > logRotateAt {
		if err := os.Rename(path, path+".1"); err != nil {
			return nil, fmt.Errorf("rotating the log: %w", err)
		}
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o640)
	if err != nil {
		return nil, fmt.Errorf("opening the log: %w", err)
	}
	return f, nil
}

// openLog is the supervisor's own log.
func openLog(path string) (zerolog.Logger, func(), error) {
	f, err := rotated(path)
	if err != nil {
		return zerolog.Nop(), nil, err
	}
	return zerolog.New(f).With().Timestamp().Logger(), func() { f.Close() }, nil
}

// tail keeps the newest max bytes written to it.
type tail struct {
	mu  sync.Mutex
	max int
	buf []byte
}

// Write implements io.Writer and never fails.
func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, p...)
	if n := len(t.buf) - t.max; n > 0 {
		t.buf = t.buf[n:]
	}
	return len(p), nil
}

// sentence is the last line that holds anything, in plain words also when it is a JSON log line.
func (t *tail) sentence() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	lines := bytes.Split(bytes.TrimSpace(t.buf), []byte("\n"))
	return plainLine(lines[len(lines)-1])
}
