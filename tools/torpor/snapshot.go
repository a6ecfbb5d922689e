package main

import (
	"cmp"
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"torpor/tools/rest"
)

func (a *app) forkCommand() *cobra.Command {
	var count int
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "fork ID",
		Short: "Make sandboxes out of the present state of one, which goes on; prints their ids",
		Args:  cobra.ExactArgs(1),
		RunE: a.withClient(func(cmd *cobra.Command, c *rest.Client, args []string) error {
			if timeout < time.Second {
				return fmt.Errorf("--timeout %s: give at least 1s", timeout)
			}
			results, err := c.Fork(cmd.Context(), args[0], count, timeout)
			if err != nil {
				return err
			}
			var failed error
			for i, r := range results {
				if r.Err != nil {
					failed = cmp.Or(failed, fmt.Errorf("fork %d of %d: %w", i+1, len(results), r.Err))
					continue
				}
				fmt.Fprintln(cmd.OutOrStdout(), r.Sandbox.SandboxID)
			}
			return failed
		}),
	}
	cmd.Flags().IntVarP(&count, "count", "n", 1, "how many, 1 to 100")
	cmd.Flags().DurationVar(&timeout, "timeout", 5*time.Minute, "how long each lives")
	return cmd
}

func (a *app) rollbackCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "rollback ID SNAPSHOT",
		Short: "Take a sandbox back to one of its snapshots, memory and disk",
		Args:  cobra.ExactArgs(2),
		RunE: a.withClient(func(cmd *cobra.Command, c *rest.Client, args []string) error {
			_, err := c.Rollback(cmd.Context(), args[0], args[1])
			return err
		}),
	}
}

func (a *app) snapshotCreateCommand() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:   "create ID",
		Short: "Keep the present state of a sandbox, which is not disturbed; prints the snapshot's id",
		Args:  cobra.ExactArgs(1),
		RunE: a.withClient(func(cmd *cobra.Command, c *rest.Client, args []string) error {
			s, err := c.CreateSnapshot(cmd.Context(), args[0], name)
			if err == nil {
				_, err = fmt.Fprintln(cmd.OutOrStdout(), s.SnapshotID)
			}
			return err
		}),
	}
	cmd.Flags().StringVar(&name, "name", "", "a name for it, or name:tag; taken from the snapshot that has it")
	return cmd
}

func (a *app) snapshotListCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "list [ID]",
		Short: "List snapshots, newest first; with a sandbox's id its own, with age and size",
		Args:  cobra.MaximumNArgs(1),
		RunE: a.withClient(func(cmd *cobra.Command, c *rest.Client, args []string) error {
			table := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 8, 2, ' ', 0)
			if len(args) == 0 {
				all, err := c.Snapshots(cmd.Context())
				if err != nil {
					return err
				}
				fmt.Fprintln(table, "SNAPSHOT\tNAMES")
				for _, s := range all {
					fmt.Fprintf(table, "%s\t%s\n", s.SnapshotID, names(s))
				}
				return table.Flush()
			}
			own, err := c.SnapshotsOf(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			fmt.Fprintln(table, "SNAPSHOT\tNAMES\tCREATED\tMIB")
			for _, s := range own {
				fmt.Fprintf(table, "%s\t%s\t%s\t%.1f\n", s.SnapshotID, names(s.Snapshot), s.CreatedAt.Format(time.RFC3339), mib(s.SizeBytes))
			}
			return table.Flush()
		}),
	}
}

func names(s rest.Snapshot) string { return cmp.Or(strings.Join(s.Names, ","), "-") }

func (a *app) snapshotRemoveCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "rm SNAPSHOT...",
		Short: "Remove snapshots, by id or name; what was made from them is not touched",
		Args:  cobra.MinimumNArgs(1),
		RunE: a.withClient(func(cmd *cobra.Command, c *rest.Client, args []string) error {
			for _, ref := range args {
				if err := c.DeleteSnapshot(cmd.Context(), ref); err != nil {
					return err
				}
			}
			return nil
		}),
	}
}
