package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"torpor/tools/hostvm"
	"torpor/tools/rest"
)

// Budgets of `torpor down`, times the slow factor.
const (
	pauseAllBudget = time.Minute
	pauseFanout    = 4
)

type downOptions struct {
	up          upOptions
	keepRunning bool
}

func (a *app) downCommand() *cobra.Command {
	var o downOptions
	cmd := &cobra.Command{
		Use:   "down",
		Short: "Put every running sandbox to sleep and stop Torpor",
		Long: "Put every running sandbox to sleep, with its memory, and stop the daemons and, where there is one, the emulated host.\n" +
			"If a sandbox cannot be paused nothing is stopped.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.up.check(); err != nil {
				return err
			}
			if hardware, _ := hostvm.Hardware(); hardware || o.up.native {
				return a.downNative(cmd.Context(), o)
			}
			if o.keepRunning {
				return errors.New("--keep-running: an emulated host takes its microVMs with it, so they are always paused first")
			}
			return a.downEmulated(cmd.Context(), o.up)
		},
	}
	f := cmd.Flags()
	f.BoolVar(&o.up.native, "native", false, "stop the daemons on this host whatever its KVM is")
	f.BoolVar(&o.keepRunning, "keep-running", false, "leave running sandboxes running; the next `torpor up` finds them")
	f.StringVar(&o.up.listen, "listen", "127.0.0.1:3000", "address `torpor up` was given")
	f.StringVar(&o.up.instance, "instance", "up", "name of the emulated host")
	f.IntVar(&o.up.slowFactor, "slow-factor", 1, "multiply the budgets")
	f.StringVar(&o.up.data, "data", "/var/lib/torpor", "what is kept")
	f.StringVar(&o.up.run, "run", "/run/torpor", "sockets and the lock")
	return cmd
}

// downNative stops the supervisor of this host and returns when it has gone. It is no error if there is none.
func (a *app) downNative(ctx context.Context, o downOptions) error {
	pid, err := holder(o.up.lockFile())
	if err != nil || pid == 0 {
		return err
	}
	slow := time.Duration(o.up.slowFactor)
	if !o.keepRunning {
		key, err := os.ReadFile(o.up.keyFile())
		if err != nil {
			return fmt.Errorf("pausing the sandboxes needs the key: %w", err)
		}
		c := &rest.Client{API: o.up.localURL(), Key: strings.TrimSpace(string(key))}
		if err := a.pauseAll(ctx, c, pauseAllBudget*slow); err != nil {
			return fmt.Errorf("nothing was stopped: %w", err)
		}
	}
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("stopping the supervisor (pid %d): %w", pid, err)
	}
	ctx, cancel := context.WithTimeout(ctx, 3*stopGrace*slow)
	defer cancel()
	if err := awaitRelease(ctx, o.up.lockFile()); err != nil {
		return err
	}
	return a.dropCredentials(o.up.localURL())
}

// pauseAll pauses every running sandbox, a few at a time. One that is gone or paused by itself meanwhile is fine.
func (a *app) pauseAll(ctx context.Context, c *rest.Client, budget time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	running, err := c.List(ctx, "running")
	if err != nil {
		return fmt.Errorf("listing the running sandboxes: %w", err)
	}
	var (
		group  errgroup.Group
		mu     sync.Mutex
		failed []error
	)
	group.SetLimit(pauseFanout)
	for _, sb := range running {
		// Told here, not in the goroutine: a writer need not bear several at once.
		fmt.Fprintf(a.stderr, "pausing %s\n", sb.SandboxID)
		group.Go(func() error {
			err := c.Pause(ctx, sb.SandboxID)
			status := rest.StatusOf(err)
			if err == nil || status == http.StatusNotFound || status == http.StatusConflict {
				return nil
			}
			mu.Lock()
			defer mu.Unlock()
			failed = append(failed, fmt.Errorf("pausing %s: %w", sb.SandboxID, err))
			return nil
		})
	}
	_ = group.Wait() // every failure is in failed
	return errors.Join(failed...)
}
