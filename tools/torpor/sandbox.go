package main

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"torpor/tools/rest"
)

func (a *app) pauseCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "pause ID",
		Short: "Put a sandbox to sleep; it is on disk when this returns",
		Args:  cobra.ExactArgs(1),
		RunE: a.withClient(func(cmd *cobra.Command, c *rest.Client, args []string) error {
			return c.Pause(cmd.Context(), args[0])
		}),
	}
}

func (a *app) resumeCommand() *cobra.Command {
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "resume ID",
		Short: "Wake a sandbox; it answers commands when this returns",
		Args:  cobra.ExactArgs(1),
		RunE: a.withClient(func(cmd *cobra.Command, c *rest.Client, args []string) error {
			if timeout < time.Second {
				return fmt.Errorf("--timeout %s: give at least 1s", timeout)
			}
			_, resumed, err := c.Connect(cmd.Context(), args[0], timeout)
			if err == nil && !resumed {
				fmt.Fprintln(cmd.ErrOrStderr(), "it was running already")
			}
			return err
		}),
	}
	cmd.Flags().DurationVar(&timeout, "timeout", 5*time.Minute, "its deadline becomes at least this far away")
	return cmd
}

func (a *app) killCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "kill ID...",
		Short: "End sandboxes, running or paused, and remove what they kept",
		Args:  cobra.MinimumNArgs(1),
		RunE: a.withClient(func(cmd *cobra.Command, c *rest.Client, args []string) error {
			for _, id := range args {
				if err := c.Kill(cmd.Context(), id); err != nil {
					return err
				}
			}
			return nil
		}),
	}
}

func (a *app) logsCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "logs ID",
		Short: "Print the newest output of a sandbox's serial console",
		Args:  cobra.ExactArgs(1),
		RunE: a.withClient(func(cmd *cobra.Command, c *rest.Client, args []string) error {
			return c.Console(cmd.Context(), args[0], cmd.OutOrStdout())
		}),
	}
}

func (a *app) stateCommand() *cobra.Command {
	var watch bool
	cmd := &cobra.Command{
		Use:   "state ID",
		Short: "Print a sandbox's state as JSON: the VM's and envd's apart",
		Args:  cobra.ExactArgs(1),
		RunE: a.withClient(func(cmd *cobra.Command, c *rest.Client, args []string) error {
			out := json.NewEncoder(cmd.OutOrStdout())
			if !watch {
				state, err := c.RawState(cmd.Context(), args[0])
				if err != nil {
					return err
				}
				out.SetIndent("", "  ")
				return out.Encode(state)
			}
			var outErr error
			err := c.WatchState(cmd.Context(), args[0], func(line json.RawMessage) bool {
				outErr = out.Encode(line)
				return outErr == nil
			})
			if err == nil {
				err = outErr
			}
			return err
		}),
	}
	cmd.Flags().BoolVar(&watch, "watch", false, "print one JSON line at every change until the sandbox is gone")
	return cmd
}

func (a *app) eventsCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "events ID",
		Short: "Print every transition of a sandbox and its reason, oldest first",
		Args:  cobra.ExactArgs(1),
		RunE: a.withClient(func(cmd *cobra.Command, c *rest.Client, args []string) error {
			events, err := c.Events(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			for _, e := range events {
				from := e.From
				if from == "" {
					from = "-"
				}
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s  #%d  %-4s  %s -> %s  %s\n",
					e.At.Format("2006-01-02T15:04:05.000Z07:00"), e.Incarnation, e.Type, from, e.To, e.Reason)
				if err != nil {
					return err
				}
			}
			return nil
		}),
	}
}

// withClient gives a command its API client.
func (a *app) withClient(do func(*cobra.Command, *rest.Client, []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		c, err := a.client()
		if err != nil {
			return err
		}
		return do(cmd, c, args)
	}
}
