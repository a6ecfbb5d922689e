package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"torpor/tools/hostvm"
)

// upOptions are the flags of `torpor up`.
type upOptions struct {
	native     bool
	detach     bool
	listen     string
	domain     string
	instance   string
	slowFactor int
	data, run  string
	images     string
	readyFD    int
}

func (a *app) upCommand() *cobra.Command {
	var o upOptions
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Bring Torpor up on this machine and print how to reach it; while it is up, just print that",
		Long: "Bring Torpor up and print E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY. While it is up, just print them.\n\n" +
			"With hardware KVM the daemons run on this host. Without, they run inside an emulated host (QEMU), reached by a\n" +
			"port on loopback. `torpor up --native` stays in the foreground and supervises the daemons on this very host.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.check(); err != nil {
				return err
			}
			switch {
			case o.native && !o.detach:
				return a.upForeground(cmd.Context(), o)
			case o.native:
				return a.upDetached(cmd.Context(), o)
			}
			hardware, why := hostvm.Hardware()
			if hardware {
				return a.upDetached(cmd.Context(), o)
			}
			fmt.Fprintf(a.stderr, "using an emulated host: %s\n", why)
			return a.upEmulated(cmd.Context(), o)
		},
	}
	f := cmd.Flags()
	f.BoolVar(&o.native, "native", false, "run the daemons on this host whatever its KVM is, supervised in the foreground")
	f.BoolVar(&o.detach, "detach", false, "with --native: return when ready and leave the supervisor running")
	f.StringVar(&o.listen, "listen", "127.0.0.1:3000", "address of the one listener")
	f.StringVar(&o.domain, "domain", "", "domain of sandbox host names, passed to the control plane")
	f.StringVar(&o.instance, "instance", "up", "name of the emulated host")
	f.IntVar(&o.slowFactor, "slow-factor", 1, "multiply every budget of the agent: 10 suits an emulated host")
	f.StringVar(&o.data, "data", "/var/lib/torpor", "what is kept")
	f.StringVar(&o.run, "run", "/run/torpor", "sockets and the lock")
	f.StringVar(&o.images, "images", "", "image sets (default DATA/images)")
	f.IntVar(&o.readyFD, "ready-fd", 0, "used by --detach")
	_ = f.MarkHidden("ready-fd") // fails only for a flag that does not exist
	return cmd
}

func (o *upOptions) check() error {
	if _, err := o.port(); err != nil {
		return err
	}
	if o.detach && !o.native {
		return errors.New("--detach goes with --native only; without it `torpor up` detaches anyway")
	}
	if o.slowFactor < 1 || o.slowFactor > 100 {
		return fmt.Errorf("--slow-factor %d: give 1 to 100", o.slowFactor)
	}
	if o.images == "" {
		o.images = filepath.Join(o.data, "images")
	}
	return nil
}

func (o *upOptions) port() (int, error) {
	_, port, err := net.SplitHostPort(o.listen)
	number, numErr := strconv.ParseUint(port, 10, 16)
	if err != nil || numErr != nil || number == 0 {
		return 0, fmt.Errorf("--listen %q: write ADDRESS:PORT, for instance 127.0.0.1:3000", o.listen)
	}
	return int(number), nil
}

// localURL is how programs on this machine reach a listener at o.listen.
func (o *upOptions) localURL() string {
	host, port, _ := net.SplitHostPort(o.listen) // checked by check
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return "http://" + net.JoinHostPort(host, port)
}

func (o *upOptions) keyFile() string   { return filepath.Join(o.data, "controlplane", "api-key") }
func (o *upOptions) agentSock() string { return filepath.Join(o.run, "agent.sock") }
func (o *upOptions) lockFile() string  { return filepath.Join(o.run, "up.lock") }

// announce keeps the credentials for the other commands and prints them, last of all.
func (a *app) announce(url, key string) error {
	c := credentials{APIURL: url, SandboxURL: url, APIKey: key}
	if err := a.saveCredentials(c); err != nil {
		return err
	}
	_, err := fmt.Fprint(a.stdout, c.lines(""))
	return err
}

// announceLocal reads the key of the control plane on this host.
func (a *app) announceLocal(o upOptions) error {
	key, err := os.ReadFile(o.keyFile())
	if err != nil {
		return fmt.Errorf("Torpor is up, but its key cannot be read: %w", err)
	}
	return a.announce(o.localURL(), strings.TrimSpace(string(key)))
}

// upForeground supervises the daemons until ctx ends (Ctrl-C, SIGTERM). VMs outlive it.
func (a *app) upForeground(ctx context.Context, o upOptions) (err error) {
	report := a.readyReporter(o)
	defer func() { report(err) }() // no-op once readiness was reported
	lock, err := takeLock(o.lockFile())
	if errors.Is(err, errLocked) {
		return a.announceLocal(o)
	}
	if err != nil {
		return err
	}
	defer lock.release()
	if err := preflight(o); err != nil {
		return err
	}
	log, closeLog, err := openLog(filepath.Join(o.data, "log", "up.log"))
	if err != nil {
		return err
	}
	defer closeLog()
	s := &supervisor{log: log, delays: restartDelays, grace: stopGrace * time.Duration(o.slowFactor)}
	daemons, err := o.daemons()
	if err != nil {
		return err
	}
	return s.run(ctx, daemons, func(ctx context.Context) error {
		if err := a.waitReady(ctx, o); err != nil {
			return err
		}
		if o.readyFD == 0 {
			if err := a.announceLocal(o); err != nil {
				return err
			}
			fmt.Fprintln(a.stderr, "up; Ctrl-C stops the daemons and leaves the sandboxes running")
		}
		report(nil)
		return nil
	})
}
