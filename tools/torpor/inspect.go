package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"torpor/vmm/cow"
)

func (a *app) diskCommand() *cobra.Command {
	var verify bool
	inspect := &cobra.Command{
		Use:   "inspect FILE...",
		Short: "Check disk layers and print what they hold",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			for _, path := range args {
				if err := inspectDisk(cmd.OutOrStdout(), path, verify); err != nil {
					return fmt.Errorf("%s: %w", path, err)
				}
			}
			return nil
		},
	}
	inspect.Flags().BoolVar(&verify, "verify", false, "read all data too, and compare the checksums of a sealed layer")
	group := &cobra.Command{Use: "disk", Short: "Look into disk layers on this host"}
	group.AddCommand(inspect)
	return group
}

// inspectDisk prints a layer; opening it checks all but its data.
func inspectDisk(w io.Writer, path string, verify bool) error {
	info, err := cow.Inspect(path)
	if err == nil && verify {
		err = cow.Verify(path)
	}
	if err != nil {
		return err
	}
	sealed := "not sealed"
	if info.Sealed {
		sealed = "sealed"
	}
	_, err = fmt.Fprintf(w, "%s: disk of %d MiB, %d blocks stored (%.1f MiB), %d known to be zero, format %d, %s\n", path,
		info.VirtualSize>>20, info.DataBlocks, mib(info.DataBlocks*cow.BlockSize), info.ZeroBlocks, info.Version, sealed)
	return err
}

func mib(bytes int64) float64 { return float64(bytes) / (1 << 20) }
