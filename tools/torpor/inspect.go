package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"torpor/vmm/cow"
	"torpor/vmm/snapshot"
)

// The files of a snapshot directory, a generation's or a template's.
const (
	stateName = "vmstate"
	diffName  = "mem.diff"
	fullName  = "mem"
)

func (a *app) snapshotCommand() *cobra.Command {
	group := &cobra.Command{Use: "snapshot", Short: "Keep and remove snapshots of sandboxes; look into snapshot directories on this host"}
	group.AddCommand(
		a.snapshotCreateCommand(), a.snapshotListCommand(), a.snapshotRemoveCommand(),
		&cobra.Command{
			Use:   "inspect DIR",
			Short: "Print what a snapshot says of itself",
			Args:  cobra.ExactArgs(1),
			RunE:  func(cmd *cobra.Command, args []string) error { return inspectSnapshot(cmd.OutOrStdout(), args[0]) },
		},
		verifyCommand(),
	)
	return group
}

func verifyCommand() *cobra.Command {
	var base string
	cmd := &cobra.Command{
		Use:   "verify DIR",
		Short: "Read every byte of a snapshot and compare the checksums",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := verifySnapshot(args[0], base); err != nil {
				return err
			}
			_, err := fmt.Fprintln(cmd.OutOrStdout(), "ok")
			return err
		},
	}
	cmd.Flags().StringVar(&base, "base", "", "memory file of the template, to verify it too")
	return cmd
}

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

func inspectSnapshot(w io.Writer, dir string) error {
	state, err := snapshot.InspectState(filepath.Join(dir, stateName))
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "id       %s\nshape    %d vCPUs, %d MiB, console %t, vsock CID %d\n",
		state.ID, state.Shape.VCPUs, state.Shape.MemoryBytes>>20, state.Shape.Console, state.Shape.VsockCID)
	for _, d := range state.Shape.Disks {
		fmt.Fprintf(w, "disk     %s, %d MiB\n", d.ID, d.Bytes>>20)
	}
	for _, d := range state.Devices {
		fmt.Fprintf(w, "device   %s, %d bytes of state\n", d.Name, len(d.Data))
	}
	if state.Memory.Kind == snapshot.Full {
		info, err := os.Stat(filepath.Join(dir, fullName))
		if err != nil {
			return fmt.Errorf("memory: %w", err)
		}
		fmt.Fprintf(w, "memory   full, %d MiB\n", info.Size()>>20)
		return nil
	}
	diff, runs, err := snapshot.InspectLayer(filepath.Join(dir, diffName), diffName)
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "memory   %d pages stored (%.1f MiB) in %d runs, %d pages zero, the rest as in the template\n",
		diff.DataPages, mib(int64(diff.DataPages)*snapshot.PageSize), len(runs), diff.ZeroPages)
	return nil
}

// verifySnapshot checks the state, and the memory file that is there; and the base when it is given.
func verifySnapshot(dir, base string) error {
	state, err := snapshot.ReadState(filepath.Join(dir, stateName))
	if err != nil {
		return err
	}
	if state.Memory.Kind == snapshot.Full {
		err = snapshot.VerifyMemory(filepath.Join(dir, fullName), state)
	} else {
		err = snapshot.VerifyLayers(state, filepath.Join(dir, diffName))
	}
	if err == nil && base != "" {
		err = snapshot.VerifyMemory(base, state)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the memory of this snapshot is missing: %w", err)
	}
	return err
}

func mib(bytes int64) float64 { return float64(bytes) / (1 << 20) }
