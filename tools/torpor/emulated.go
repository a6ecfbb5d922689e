package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/rs/zerolog"

	"torpor/tools/hostvm"
	"torpor/tools/rest"
)

// emulatedSlowFactor multiplies the budgets inside an emulated host, where all runs 10 to 50 times slower.
const emulatedSlowFactor = 10

// Where an emulated host has the programs and the key, and the port it listens on.
const (
	insideTorpor = "/usr/lib/torpor/bin/torpor"
	insideKey    = "/var/lib/torpor/controlplane/api-key"
	insidePort   = 3000
)

// hostVM is one emulated host with its output passed on to the user.
type hostVM struct {
	*hostvm.Instance
	cache  string
	stderr io.Writer
}

func (a *app) hostVM(name string) (hostVM, error) {
	cache, err := hostvm.CacheDir()
	if err != nil {
		return hostVM{}, err
	}
	instance, err := hostvm.Open(cache, name)
	return hostVM{instance, cache, a.stderr}, err
}

// run executes a shell command as root in the host and returns its standard output. A command that fails is an error made of
// its last words.
func (h hostVM) run(ctx context.Context, shell string) (string, error) {
	var out bytes.Buffer
	last := &tail{max: lastLineSize}
	code, err := h.Exec(ctx, shell, nil, &out, io.MultiWriter(h.stderr, last))
	if err != nil {
		return "", err
	}
	if code != 0 {
		return "", errors.New(cmp.Or(strings.TrimPrefix(last.sentence(), "torpor: "), fmt.Sprintf("exit status %d of %q", code, shell)))
	}
	return out.String(), nil
}

// isUp tells whether the host runs; one that runs but does not answer is an error that says what to do.
func (h hostVM) isUp(ctx context.Context, name string) (bool, error) {
	status, err := h.Status(ctx)
	if err != nil {
		return false, err
	}
	switch status.State {
	case "down":
		return false, nil
	case "running":
		return true, nil
	}
	return false, fmt.Errorf("the emulated host %s is %s (%s): stop it with `torpor-hostvm down --instance %s`", name, status.State, status.Reason, name)
}

// upEmulated starts the emulated host and, in it, what upDetached starts on a hardware host. If that fails, a host that was
// started for it is stopped again; what was logged is on its disk.
func (a *app) upEmulated(ctx context.Context, o upOptions) error {
	h, err := a.hostVM(o.instance)
	if err != nil {
		return err
	}
	up, err := h.isUp(ctx, o.instance)
	if err != nil {
		return err
	}
	err = a.startEmulatedHost(ctx, h, o, up)
	if err == nil {
		err = a.startInside(ctx, h, o)
	}
	if err != nil && !up {
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopGrace*emulatedSlowFactor)
		defer cancel()
		err = errors.Join(err, h.Down(stop, false))
	}
	return err
}

// startEmulatedHost starts the host, or brings changed programs into the one that runs.
func (a *app) startEmulatedHost(ctx context.Context, h hostVM, o upOptions, up bool) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("finding the programs beside this one: %w", err)
	}
	cfg := hostvm.Config{
		Log:   zerolog.New(zerolog.ConsoleWriter{Out: a.stderr, NoColor: true, TimeFormat: time.TimeOnly}).With().Timestamp().Logger(),
		Cache: h.cache, Bin: filepath.Dir(self),
	}
	if !up {
		port, err := o.port()
		if err != nil {
			return err
		}
		if err := portFree(net.JoinHostPort("127.0.0.1", strconv.Itoa(port))); err != nil {
			return err
		}
		cfg.Forwards = []hostvm.Forward{{Host: port, Guest: insidePort}}
		if cfg.Images, err = a.buildImages(ctx); err != nil {
			return err
		}
		fmt.Fprintln(a.stderr, "starting the emulated host")
	}
	if err := h.Up(ctx, cfg); err != nil {
		return fmt.Errorf("starting the emulated host: %w", err)
	}
	return nil
}

// startInside starts Torpor in the host that runs, unless it is up, and announces it.
func (a *app) startInside(ctx context.Context, h hostVM, o upOptions) error {
	addr, err := h.Address(insidePort)
	if err != nil {
		return err
	}
	start := fmt.Sprintf("%s up --native --detach --listen 0.0.0.0:%d --slow-factor %d", insideTorpor, insidePort, max(o.slowFactor, emulatedSlowFactor))
	if o.domain != "" {
		start += " --domain '" + strings.ReplaceAll(o.domain, "'", `'\''`) + "'"
	}
	if _, err := h.run(ctx, start); err != nil {
		return fmt.Errorf("starting Torpor in the emulated host: %w", err)
	}
	key, err := h.run(ctx, "cat "+insideKey)
	if err != nil {
		return fmt.Errorf("reading the API key: %w", err)
	}
	if err := a.checkForward(ctx, "http://"+addr); err != nil {
		return err
	}
	return a.announce("http://"+addr, strings.TrimSpace(key))
}

// buildImages returns the directory of the guest image set, which is found in the cache unless its inputs changed.
func (a *app) buildImages(ctx context.Context, args ...string) (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("finding the programs beside this one: %w", err)
	}
	last := &tail{max: lastLineSize}
	cmd := exec.CommandContext(ctx, filepath.Join(filepath.Dir(self), "torpor-images"), append([]string{"build"}, args...)...)
	cmd.Stderr = io.MultiWriter(a.stderr, last)
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("building the guest image: %s", cmp.Or(strings.TrimPrefix(last.sentence(), "torpor-images: "), err.Error()))
	}
	return strings.TrimSpace(string(out)), nil
}

// forwardBudget bounds the first request through the forwarded port.
const forwardBudget = 30 * time.Second

func (a *app) checkForward(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, forwardBudget)
	defer cancel()
	c := &rest.Client{API: url}
	err := retry(ctx, func() (bool, error) {
		_, err := c.Health(ctx)
		return err == nil, err
	})
	if err != nil {
		return fmt.Errorf("Torpor runs in the emulated host, but its port does not answer here: %w", err)
	}
	return nil
}

// downEmulated puts the sandboxes to sleep, stops the daemons inside, then the emulated host.
func (a *app) downEmulated(ctx context.Context, o upOptions) error {
	h, err := a.hostVM(o.instance)
	if err != nil {
		return err
	}
	up, err := h.isUp(ctx, o.instance)
	if err != nil {
		return err
	}
	if up {
		addr, err := h.Address(insidePort)
		if err != nil {
			return err
		}
		stop := fmt.Sprintf("%s down --native --listen 0.0.0.0:%d --slow-factor %d", insideTorpor, insidePort, max(o.slowFactor, emulatedSlowFactor))
		if _, err := h.run(ctx, stop); err != nil {
			return fmt.Errorf("the emulated host was left up: %w", err)
		}
		if err := a.dropCredentials("http://" + addr); err != nil {
			return err
		}
	}
	if err := h.Down(ctx, false); err != nil {
		return fmt.Errorf("stopping the emulated host: %w", err)
	}
	return nil
}
