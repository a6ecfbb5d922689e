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
	"strings"

	"torpor/tools/hostvm"
)

// The emulated host the measurements run in, and where its port shows up here.
const (
	instanceName = "test"
	listen       = "127.0.0.1:3100"
)

// drive brings Torpor up where it runs on this machine, measures there, and reports here.
func drive(ctx context.Context, o options) error {
	root, err := repository(ctx)
	if err != nil {
		return err
	}
	state, err := os.MkdirTemp("", "torpor-bench-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(state) }() // credentials of a run, gone or only litter
	b := &bench{root: root, state: state}
	hardware, _ := hostvm.Hardware()
	b.emulated = !hardware
	down, err := b.up(ctx)
	if err != nil {
		return err
	}
	if o.what == footprints {
		err := b.measure(ctx, o, os.Stdout)
		return errors.Join(err, down(context.WithoutCancel(ctx)))
	}
	var raw bytes.Buffer
	err = b.measure(ctx, o, &raw)
	facts := conditions{emulated: b.emulated, touched: o.touched, rounds: o.rounds}
	if err == nil {
		var host bytes.Buffer
		err = b.shell(ctx, "uname -sr; grep -m1 'model name' /proc/cpuinfo | cut -d: -f2-; nproc", &host, os.Stderr)
		facts.host = strings.Join(strings.Fields(strings.ReplaceAll(host.String(), "\n", " / ")), " ")
	}
	if downErr := down(context.WithoutCancel(ctx)); err == nil {
		err = downErr
	}
	if err != nil {
		return err
	}
	if err := os.WriteFile(o.csv, raw.Bytes(), 0o644); err != nil {
		return fmt.Errorf("keeping the measurements: %w", err)
	}
	samples, err := readSamples(&raw)
	if err != nil {
		return err
	}
	err = report(os.Stdout, samples, facts, o.least)
	fmt.Printf("every measurement: %s\n", o.csv)
	return err
}

// bench is one run.
type bench struct {
	root, state string
	emulated    bool
	instance    *hostvm.Instance
}

// up brings Torpor up and returns what takes it down again; nothing is taken down that was up before.
func (b *bench) up(ctx context.Context) (down func(context.Context) error, err error) {
	nothing := func(context.Context) error { return nil }
	args := []string{"up"}
	if b.emulated {
		cache, err := hostvm.CacheDir()
		if err != nil {
			return nil, err
		}
		if b.instance, err = hostvm.Open(cache, instanceName); err != nil {
			return nil, err
		}
		args = append(args, "--instance", instanceName, "--listen", listen)
		if status, err := b.instance.Status(ctx); err != nil {
			return nil, err
		} else if status.State == "running" {
			return nothing, b.torpor(ctx, args...)
		}
	}
	if err := b.torpor(ctx, args...); err != nil {
		return nil, err
	}
	if !b.emulated {
		return nothing, nil // a hardware host is the user's own, and stays as it is
	}
	return func(ctx context.Context) error {
		return b.torpor(ctx, "down", "--instance", instanceName, "--listen", listen)
	}, nil
}

func (b *bench) torpor(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, filepath.Join(b.root, ".bin", "torpor"), args...)
	cmd.Env = append(os.Environ(), "XDG_STATE_HOME="+b.state) // the user's own credentials stay as they are
	cmd.Stderr = os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("torpor %s: %w", strings.Join(args, " "), err)
	}
	return nil
}

// measure builds this program for the host and runs it there.
func (b *bench) measure(ctx context.Context, o options, stdout io.Writer) error {
	program := filepath.Join(b.state, "torpor-bench")
	build := exec.CommandContext(ctx, "go", "build", "-o", program, "./tools/bench")
	build.Dir, build.Stderr = b.root, os.Stderr
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if err := build.Run(); err != nil {
		return fmt.Errorf("building the benchmark: %w", err)
	}
	vmm, api := filepath.Join(b.root, ".bin", "torpor-vmm"), "http://127.0.0.1:3000"
	if b.emulated {
		remote := "/var/lib/torpor/torpor-bench"
		if err := b.instance.Push(ctx, program, remote); err != nil {
			return err
		}
		program, vmm = remote, "/usr/lib/torpor/bin/torpor-vmm"
	}
	line := fmt.Sprintf("%s -on-host -rounds %d -touched %d -most %g -vmm %s -api %s %s", program, o.rounds, o.touched, o.most, vmm, api, o.what)
	err := b.shell(ctx, line, stdout, os.Stderr)
	if b.emulated {
		err = errors.Join(err, b.shell(ctx, "rm "+program, io.Discard, os.Stderr))
	}
	return err
}

// shell runs a command on the host that runs the microVMs.
func (b *bench) shell(ctx context.Context, line string, stdout, stderr io.Writer) error {
	code := 0
	var err error
	if b.emulated {
		code, err = b.instance.Exec(ctx, line, nil, stdout, stderr)
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

// repository finds the root of the source tree this program is run in.
func repository(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	mod := strings.TrimSpace(string(out))
	if err != nil || filepath.Base(mod) != "go.mod" {
		return "", errors.New("run the benchmark inside the repository (`make bench`)")
	}
	return filepath.Dir(mod), nil
}
