package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"torpor/agent/snapcache"
	"torpor/vmm/snapshot"
)

// The files of a snapshot directory without a manifest that says otherwise: a template's, or one of an earlier version.
const (
	stateName = "vmstate"
	diffName  = "mem.diff"
	fullName  = "mem"
)

func (a *app) snapshotCommand() *cobra.Command {
	var base string
	verify := &cobra.Command{
		Use:   "verify DIR|FILE",
		Short: "Read every byte of a snapshot, a state or a memory layer, and compare the checksums",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := verifyPath(args[0], base); err != nil {
				return err
			}
			_, err := fmt.Fprintln(cmd.OutOrStdout(), "ok")
			return err
		},
	}
	verify.Flags().StringVar(&base, "base", "", "memory file of the template, to verify it too")
	group := &cobra.Command{Use: "snapshot", Short: "Keep and remove snapshots of sandboxes; look into snapshots on this host"}
	group.AddCommand(a.snapshotCreateCommand(), a.snapshotListCommand(), a.snapshotRemoveCommand(), verify, &cobra.Command{
		Use:   "inspect DIR|FILE",
		Short: "Print what a snapshot, a state or a memory layer says of itself",
		Args:  cobra.ExactArgs(1),
		RunE:  func(cmd *cobra.Command, args []string) error { return inspectPath(cmd.OutOrStdout(), args[0]) },
	})
	return group
}

// saved is the files of a snapshot.
type saved struct {
	state  string
	base   string   // empty: the template's
	layers []string // oldest first
}

// savedIn finds the files of a snapshot directory.
func savedIn(dir string) (saved, error) {
	in := func(name string) string { return filepath.Join(dir, name) }
	out := saved{state: in(stateName)}
	switch s, err := snapcache.Load(dir); {
	case err == nil && len(s.Manifest.MemoryFiles()) > 0:
		if s.Manifest.Base != "" {
			out.base = in(s.Manifest.Base)
		}
		for _, name := range s.Manifest.Memory {
			out.layers = append(out.layers, in(name))
		}
		return out, nil
	case err != nil && !errors.Is(err, snapcache.ErrNotExist):
		return out, err
	}
	if _, err := os.Stat(in(diffName)); err == nil {
		out.layers = []string{in(diffName)}
	} else {
		out.base = in(fullName)
	}
	return out, nil
}

// fileKind tells what a file is by its first bytes, which of every format are its magic.
func fileKind(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	magic := make([]byte, 8)
	if _, err := io.ReadFull(f, magic); err != nil {
		return "", fmt.Errorf("%s: this is neither a state nor a memory layer: %w", path, err)
	}
	return string(magic), nil
}

func isDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// stateMagic begins a state; what is nothing else is taken for a layer, and refused if it is none.
const stateMagic = "TORPORST"

func inspectPath(w io.Writer, path string) error {
	if isDir(path) {
		return inspectSnapshot(w, path)
	}
	switch kind, err := fileKind(path); {
	case err != nil:
		return err
	case kind == stateMagic:
		_, err := inspectState(w, path)
		return err
	default:
		return inspectLayer(w, path, "layer")
	}
}

func inspectSnapshot(w io.Writer, dir string) error {
	files, err := savedIn(dir)
	if err != nil {
		return err
	}
	state, err := inspectState(w, files.state)
	if err != nil {
		return err
	}
	base := "the template's"
	if files.base != "" {
		base = filepath.Base(files.base)
	}
	fmt.Fprintf(w, "memory   %v, %d MiB, base %v: %s\n", state.Memory.Kind, state.Shape.MemoryBytes>>20, state.Base(), base)
	for i, path := range files.layers {
		if err := inspectLayer(w, path, snapshot.LayerLabel(i)); err != nil {
			return err
		}
	}
	return nil
}

func inspectState(w io.Writer, path string) (*snapshot.State, error) {
	state, err := snapshot.InspectState(path)
	if err != nil {
		return nil, err
	}
	fmt.Fprintf(w, "id       %s\nshape    %d vCPUs, %d MiB, console %t, vsock CID %d\n",
		state.ID, state.Shape.VCPUs, state.Shape.MemoryBytes>>20, state.Shape.Console, state.Shape.VsockCID)
	fmt.Fprintf(w, "cpu      %s, template %q\n", state.CPU.Vendor, state.CPU.Template)
	if state.Host != (snapshot.Host{}) {
		fmt.Fprintf(w, "host     Linux %s, %s\n", state.Host.Kernel, state.Host.KVM)
	}
	for _, d := range state.Shape.Disks {
		fmt.Fprintf(w, "disk     %s, %d MiB\n", d.ID, d.Bytes>>20)
	}
	for _, d := range state.Devices {
		fmt.Fprintf(w, "device   %s, %d bytes of state\n", d.Name, len(d.Data))
	}
	return state, nil
}

func inspectLayer(w io.Writer, path, label string) error {
	l, runs, err := snapshot.InspectLayer(path, label)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	fmt.Fprintf(w, "%s  %s, format %d: %d pages stored (%.1f MiB) in %d runs, %d pages zero, %d as in the base\n  id      %v\n  name    %v\n",
		label, filepath.Base(path), l.Version, l.DataPages, mib(int64(l.DataPages)*snapshot.PageSize), len(runs), l.ZeroPages, l.BasePages, l.ID, l.Name())
	if l.Version > 1 {
		fmt.Fprintf(w, "  parent  %v\n  base    %v\n", l.Parent, l.Base)
	}
	if !l.Replaces.IsZero() {
		fmt.Fprintf(w, "  digest  %v (it was merged)\n", l.Digest)
	}
	return nil
}

// verifyPath checks every byte of a snapshot directory, of a state or of a layer; of a directory also that its files belong
// together, and the base where it is given.
func verifyPath(path, base string) error {
	if isDir(path) {
		return verifySnapshot(path, base)
	}
	kind, err := fileKind(path)
	switch {
	case err != nil:
		return err
	case kind == stateMagic:
		err = snapshot.VerifyState(path)
	default:
		_, err = snapshot.VerifyLayer(path, "memory layer")
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

func verifySnapshot(dir, base string) error {
	files, err := savedIn(dir)
	if err != nil {
		return err
	}
	state, err := snapshot.ReadState(files.state)
	if err != nil {
		return err
	}
	if err := snapshot.VerifyLayers(state, files.layers...); err != nil {
		return err
	}
	for _, path := range []string{files.base, base} {
		if path == "" {
			continue
		}
		if err := snapshot.VerifyMemory(path, state); err != nil {
			return fmt.Errorf("base %s: %w", filepath.Base(path), err)
		}
	}
	return nil
}
