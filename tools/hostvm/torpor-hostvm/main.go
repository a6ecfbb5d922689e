// Torpor-hostvm starts, stops and runs commands in emulated hosts; see package hostvm.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/rs/zerolog"
	"github.com/spf13/cobra"

	"torpor/tools/hostvm"
)

// exitOwn is the exit status of a failure of this program's own, so that it is not taken for the command's.
const exitOwn = 125

// exitStatus carries the exit status of a command that was run.
type exitStatus int

func (e exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	err := root().ExecuteContext(ctx)
	stop()
	if status, ok := errors.AsType[exitStatus](err); ok {
		os.Exit(int(status))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "torpor-hostvm:", err)
		os.Exit(exitOwn)
	}
}

func root() *cobra.Command {
	c := &cobra.Command{
		Use:   "torpor-hostvm",
		Short: "A Linux host with AMD-V and KVM inside QEMU's software emulation",
		Long: "Starts, stops and runs commands in an emulated host, for machines without usable hardware virtualisation.\n" +
			"Exit status: that of the command for exec; 125 when torpor-hostvm itself failed.",
		SilenceUsage: true, SilenceErrors: true,
	}
	instance := c.PersistentFlags().String("instance", "up", "name of the emulated host")
	open := func() (*hostvm.Instance, string, error) {
		cache, err := hostvm.CacheDir()
		if err != nil {
			return nil, "", err
		}
		i, err := hostvm.Open(cache, *instance)
		return i, cache, err
	}
	c.AddCommand(up(open), down(open), execute(open), push(open), pull(open), status(open), console(open), hardware())
	return c
}

type opener func() (*hostvm.Instance, string, error)

func up(open opener) *cobra.Command {
	var cfg hostvm.Config
	var forwards []string
	c := &cobra.Command{
		Use: "up", Short: "Start the machine and wait until commands run in it; if it runs, refresh its binaries", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			i, cache, err := open()
			if err != nil {
				return err
			}
			cfg.Cache = cache
			cfg.Log = zerolog.New(zerolog.ConsoleWriter{Out: os.Stderr, NoColor: true, TimeFormat: time.TimeOnly}).With().Timestamp().Logger()
			if cfg.Bin == "" {
				self, err := os.Executable()
				if err != nil {
					return err
				}
				cfg.Bin = filepath.Dir(self)
			}
			if cfg.Forwards, err = parseForwards(forwards); err != nil {
				return err
			}
			if err := i.Up(cmd.Context(), cfg); err != nil {
				return err
			}
			return printStatus(cmd, i)
		},
	}
	f := c.Flags()
	f.StringVar(&cfg.Images, "images", "", "directory of an image set to attach")
	f.StringVar(&cfg.Bin, "bin", "", "directory of the binaries to put into the machine (default: where torpor-hostvm is)")
	f.IntVar(&cfg.MemoryMiB, "memory", 0, "memory in MiB (default 6144)")
	f.IntVar(&cfg.CPUs, "cpus", 0, "processors (default 1)")
	f.IntVar(&cfg.DataGiB, "data", 0, "size in GiB of the persistent disk, when it is made (default 20)")
	f.StringArrayVar(&forwards, "forward", nil, "HOST:GUEST port to forward from 127.0.0.1; HOST 0 means any free one; may be repeated")
	return c
}

// parseForwards reads HOST:GUEST pairs.
func parseForwards(pairs []string) ([]hostvm.Forward, error) {
	var out []hostvm.Forward
	for _, p := range pairs {
		host, guest, _ := strings.Cut(p, ":")
		h, err1 := strconv.ParseUint(host, 10, 16)
		g, err2 := strconv.ParseUint(guest, 10, 16)
		if err1 != nil || err2 != nil || g == 0 {
			return nil, fmt.Errorf("--forward %q: want HOST:GUEST, two port numbers", p)
		}
		out = append(out, hostvm.Forward{Host: int(h), Guest: int(g)})
	}
	return out, nil
}

func down(open opener) *cobra.Command {
	var purge bool
	c := &cobra.Command{
		Use: "down", Short: "Shut the machine down; its data disk stays", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			i, _, err := open()
			if err != nil {
				return err
			}
			return i.Down(cmd.Context(), purge)
		},
	}
	c.Flags().BoolVar(&purge, "purge", false, "remove the data disk and the console log too")
	return c
}

func execute(open opener) *cobra.Command {
	c := &cobra.Command{
		Use: "exec [flags] -- COMMAND...", Short: "Run a shell command as root in the machine", Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			i, _, err := open()
			if err != nil {
				return err
			}
			code, err := i.Exec(cmd.Context(), strings.Join(args, " "), os.Stdin, os.Stdout, os.Stderr)
			if err == nil && code != 0 {
				return exitStatus(code)
			}
			return err
		},
	}
	c.Flags().SetInterspersed(false)
	return c
}

func push(open opener) *cobra.Command {
	return &cobra.Command{
		Use: "push LOCAL REMOTE", Short: "Copy a file into the machine", Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			i, _, err := open()
			if err != nil {
				return err
			}
			return i.Push(cmd.Context(), args[0], args[1])
		},
	}
}

func pull(open opener) *cobra.Command {
	return &cobra.Command{
		Use: "pull REMOTE LOCAL", Short: "Copy a file out of the machine", Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			i, _, err := open()
			if err != nil {
				return err
			}
			return i.Pull(cmd.Context(), args[0], args[1])
		},
	}
}

func status(open opener) *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Say as JSON how the machine is; exit status 1 unless it runs", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			i, _, err := open()
			if err != nil {
				return err
			}
			return printStatus(cmd, i)
		},
	}
}

func printStatus(cmd *cobra.Command, i *hostvm.Instance) error {
	st, err := i.Status(cmd.Context())
	if err != nil {
		return err
	}
	enc := json.NewEncoder(cmd.OutOrStdout())
	enc.SetIndent("", "  ")
	if err := enc.Encode(st); err != nil {
		return err
	}
	if st.State != "running" {
		return exitStatus(1)
	}
	return nil
}

func console(open opener) *cobra.Command {
	return &cobra.Command{
		Use: "console", Short: "Print the machine's console log", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			i, _, err := open()
			if err != nil {
				return err
			}
			f, err := os.Open(i.Console())
			if err != nil {
				return err
			}
			defer f.Close()
			_, err = io.Copy(cmd.OutOrStdout(), f)
			return err
		},
	}
}

func hardware() *cobra.Command {
	return &cobra.Command{
		Use: "hardware", Short: "Say whether this machine needs an emulated host at all; exit status 1 if it does", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ok, why := hostvm.Hardware()
			if _, err := fmt.Fprintln(cmd.OutOrStdout(), why); err != nil || ok {
				return err
			}
			return exitStatus(1)
		},
	}
}
