// Package command runs the Debian tools that images are made with, and turns their failures into sentences that say what to do.
package command

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// debianPackage names the package that brings a tool, for the message that says it is missing.
var debianPackage = map[string]string{
	"apt-cache": "apt", "apt-config": "apt", "apt-get": "apt",
	"debugfs": "e2fsprogs", "e2fsck": "e2fsprogs", "mke2fs": "e2fsprogs",
	"dpkg-deb": "dpkg", "dpkg-query": "dpkg",
	"mmdebstrap": "mmdebstrap",
}

// stopGrace is how long a cancelled tool has to clean up after SIGTERM before it is killed.
const stopGrace = 10 * time.Second

// Command is one run of a tool.
type Command struct {
	Name  string
	Args  []string
	Dir   string    // working directory; empty: ours
	Env   []string  // added to our environment
	Stdin io.Reader // nil: empty

	// Confined runs the tool in mount and process namespaces of its own, so that what it mounted and started is gone
	// when it is, even after a kill -9 of it or of us: nothing goes on writing, and removing its half-made tree can
	// never reach into a mounted /dev or /proc. Needs root.
	Confined bool
}

// Output is what a successful run printed.
type Output struct{ Stdout, Stderr []byte }

// MissingToolError says that a tool is not installed.
type MissingToolError struct{ Tool string }

// Error implements error.
func (e *MissingToolError) Error() string {
	if pkg, ok := debianPackage[e.Tool]; ok {
		return fmt.Sprintf("%s is not installed: run apt-get install %s", e.Tool, pkg)
	}
	return e.Tool + " is not installed"
}

// FailedError is a tool's non-zero exit with the last line it said.
type FailedError struct {
	Tool     string
	LastLine string
	Err      error
}

// Error implements error.
func (e *FailedError) Error() string {
	if e.LastLine == "" {
		return fmt.Sprintf("%s: %v", e.Tool, e.Err)
	}
	return fmt.Sprintf("%s: %v: %s", e.Tool, e.Err, e.LastLine)
}

// Unwrap gives the cause; it is unix.ENOSPC where the tool said that the disk is full.
func (e *FailedError) Unwrap() error { return e.Err }

// Run runs c to its end. A failed run gives a *MissingToolError or a *FailedError; a cancelled one the context's error.
func Run(ctx context.Context, c Command) (Output, error) {
	cmd := exec.CommandContext(ctx, c.Name, c.Args...)
	cmd.Dir, cmd.Stdin = c.Dir, c.Stdin
	// Messages are matched and sorted lists compared, so the tools speak plain C.
	cmd.Env = append(append(os.Environ(), "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive"), c.Env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if c.Confined {
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWPID
		cmd.SysProcAttr.Unshareflags = syscall.CLONE_NEWNS
	}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = stopGrace

	// The kernel sends Pdeathsig when the thread that started the tool ends, so that thread has to stay.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	out := Output{Stdout: stdout.Bytes(), Stderr: stderr.Bytes()}
	switch {
	case err == nil:
		return out, nil
	case ctx.Err() != nil:
		return out, fmt.Errorf("%s: %w", c.Name, ctx.Err())
	case errors.Is(err, exec.ErrNotFound):
		return out, &MissingToolError{Tool: c.Name}
	}
	return out, failure(c.Name, err, stderr.String())
}

func failure(tool string, err error, stderr string) error {
	if strings.Contains(stderr, "No space left on device") {
		err = unix.ENOSPC
	}
	return &FailedError{Tool: tool, LastLine: lastLine(stderr), Err: err}
}

// lastLine is the last line that says something; apt and mmdebstrap put the error there, or mark it with "E:".
func lastLine(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	for i := len(lines) - 1; i >= 0; i-- {
		if line := strings.TrimSpace(lines[i]); strings.HasPrefix(line, "E:") {
			return line
		}
	}
	return strings.TrimSpace(lines[len(lines)-1])
}
