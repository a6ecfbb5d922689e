package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"torpor/tools/onhost"
	"torpor/tools/qemupeer"
)

// drive measures on the host that runs the microVMs, and reports here.
func drive(ctx context.Context, o options) (err error) {
	h, err := onhost.Open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.Close(context.WithoutCancel(ctx))) }()
	if o.what == footprints {
		return measureThere(ctx, h, o, os.Stdout)
	}
	var raw bytes.Buffer
	if err := measureThere(ctx, h, o, &raw); err != nil {
		return err
	}
	facts := conditions{emulated: h.Emulated, touched: o.touched, rounds: o.rounds}
	if facts.host, err = h.Describe(ctx); err != nil {
		return err
	}
	if err := os.WriteFile(o.csv, raw.Bytes(), 0o644); err != nil {
		return fmt.Errorf("keeping the measurements: %w", err)
	}
	samples, err := readSamples(&raw)
	if err != nil {
		return err
	}
	if o.what == restores {
		err = reportRestores(os.Stdout, samples, facts)
	} else {
		err = report(os.Stdout, samples, facts, o.least)
	}
	fmt.Printf("every measurement: %s\n", o.csv)
	return err
}

// measureThere runs this program on the host.
func measureThere(ctx context.Context, h *onhost.Host, o options, stdout io.Writer) (err error) {
	local, err := h.Build(ctx, "./tools/bench")
	if err != nil {
		return err
	}
	program, err := h.Push(ctx, local)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.Remove(context.WithoutCancel(ctx), program)) }()
	peer := ""
	if o.what == restores {
		archive := filepath.Join(h.Temp(), "qemu.tar")
		if err := packPeer(ctx, archive); err != nil {
			return err
		}
		remote, err := h.Push(ctx, archive)
		if err != nil {
			return err
		}
		peer = remote + ".d"
		defer func() {
			err = errors.Join(err, h.Shell(context.WithoutCancel(ctx), "rm -rf "+peer+" "+remote, os.Stderr, os.Stderr))
		}()
		if err := h.Shell(ctx, fmt.Sprintf("mkdir -p %s && tar xf %s -C %s", peer, remote, peer), os.Stderr, os.Stderr); err != nil {
			return err
		}
	}
	line := fmt.Sprintf("%s -on-host -rounds %d -touched %d -most %g -vmm %s -api %s -peer '%s' %s", program, o.rounds, o.touched, o.most, h.VMM, o.api, peer, o.what)
	return h.Shell(ctx, line, stdout, os.Stderr)
}

// packPeer writes an archive with QEMU.
func packPeer(ctx context.Context, path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	a := qemupeer.NewArchive(f)
	return errors.Join(a.Modules(ctx), a.QEMU(ctx), a.Close(), f.Close())
}
