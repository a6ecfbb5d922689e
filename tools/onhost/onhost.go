// Package onhost runs programs of this repository on the host that runs the microVMs: this very machine where it has hardware
// KVM, and the emulated host of the tests (hostvm.ForTests) anywhere else.
package onhost

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"torpor/tools/hostvm"
)

// remoteDir is where files are pushed to.
const remoteDir = "/var/lib/torpor"

// The emulated host the programs run in, and where its port shows up here.
var instanceName, listen = hostvm.ForTests()

// Host is a host with Torpor up. Close it.
type Host struct {
	Emulated bool
	VMM      string // path of torpor-vmm there

	root, state string
	instance    *hostvm.Instance // nil: this machine
	wasUp       bool
}

// Open brings Torpor up on the host; what was up before stays up at Close.
func Open(ctx context.Context) (_ *Host, err error) {
	root, err := repository(ctx)
	if err != nil {
		return nil, err
	}
	state, err := os.MkdirTemp("", "torpor-onhost-")
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = os.RemoveAll(state) // litter at most
		}
	}()
	hardware, _ := hostvm.Hardware()
	h := &Host{Emulated: !hardware, VMM: filepath.Join(root, ".bin", "torpor-vmm"), root: root, state: state}
	if hardware {
		return h, h.torpor(ctx, "up")
	}
	h.VMM = "/usr/lib/torpor/bin/torpor-vmm"
	cache, err := hostvm.CacheDir()
	if err != nil {
		return nil, err
	}
	if h.instance, err = hostvm.Open(cache, instanceName); err != nil {
		return nil, err
	}
	status, err := h.instance.Status(ctx)
	if err != nil {
		return nil, err
	}
	h.wasUp = status.State == "running"
	return h, h.torpor(ctx, "up", "--instance", instanceName, "--listen", listen)
}

// Close takes down an emulated host that Open started. A hardware host is the user's own and stays as it is.
func (h *Host) Close(ctx context.Context) error {
	defer func() { _ = os.RemoveAll(h.state) }() // credentials of the run; only litter
	if !h.Emulated || h.wasUp {
		return nil
	}
	return h.torpor(ctx, "down", "--instance", instanceName, "--listen", listen)
}

func (h *Host) torpor(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, filepath.Join(h.root, ".bin", "torpor"), args...)
	cmd.Env = append(os.Environ(), "XDG_STATE_HOME="+h.state) // the user's own credentials stay as they are
	cmd.Stderr = os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("torpor %s: %w", strings.Join(args, " "), err)
	}
	return nil
}

// Build builds a program of this repository, static, and returns where it is here.
func (h *Host) Build(ctx context.Context, pkg string) (string, error) {
	program := filepath.Join(h.state, filepath.Base(pkg))
	build := exec.CommandContext(ctx, "go", "build", "-o", program, pkg)
	build.Dir, build.Stderr = h.root, os.Stderr
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if err := build.Run(); err != nil {
		return "", fmt.Errorf("building %s: %w", pkg, err)
	}
	return program, nil
}

// Temp is a directory here that goes away at Close.
func (h *Host) Temp() string { return h.state }

// Push makes a file of this machine available on the host and returns its path there.
func (h *Host) Push(ctx context.Context, local string) (string, error) {
	if !h.Emulated {
		return local, nil
	}
	remote := filepath.Join(remoteDir, filepath.Base(local))
	return remote, h.instance.Push(ctx, local, remote)
}

// Remove takes a file back that Push put there.
func (h *Host) Remove(ctx context.Context, remote string) error {
	if !h.Emulated {
		return nil
	}
	return h.Shell(ctx, "rm -rf "+remote, io.Discard, os.Stderr)
}

// Shell runs a command on the host as root; an exit status other than 0 is an error.
func (h *Host) Shell(ctx context.Context, line string, stdout, stderr io.Writer) error {
	code := 0
	var err error
	if h.Emulated {
		code, err = h.instance.Exec(ctx, line, nil, stdout, stderr)
	} else {
		cmd := exec.CommandContext(ctx, "sh", "-c", line)
		cmd.Stdout, cmd.Stderr = stdout, stderr
		err = cmd.Run()
	}
	if err == nil && code != 0 {
		err = fmt.Errorf("exit status %d", code)
	}
	if err != nil {
		return fmt.Errorf("%q on the host: %w", line, err)
	}
	return nil
}

// Describe is one line about the host: its kernel, its processor and how many there are.
func (h *Host) Describe(ctx context.Context) (string, error) {
	var out strings.Builder
	err := h.Shell(ctx, "uname -sr; grep -m1 'model name' /proc/cpuinfo | cut -d: -f2-; nproc", &out, os.Stderr)
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	return strings.Join(lines, " / "), err
}

// repository finds the root of the source tree this program is run in.
func repository(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	mod := strings.TrimSpace(string(out))
	if err != nil || filepath.Base(mod) != "go.mod" {
		return "", errors.New("run this inside the repository")
	}
	return filepath.Dir(mod), nil
}
