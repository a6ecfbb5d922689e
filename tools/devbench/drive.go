package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"torpor/tools/onhost"
)

// drive measures on the host that runs the microVMs, and reports here.
func drive(ctx context.Context, o options) (err error) {
	h, err := onhost.Open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.Close(context.WithoutCancel(ctx))) }()
	archive := filepath.Join(h.Temp(), "devbench.tar")
	if err := pack(ctx, h, archive); err != nil {
		return err
	}
	remote, err := h.Push(ctx, archive)
	if err != nil {
		return err
	}
	dir := remote + ".d"
	defer func() {
		err = errors.Join(err, h.Shell(context.WithoutCancel(ctx), "rm -rf "+dir+" "+remote, os.Stderr, os.Stderr))
	}()
	if err := h.Shell(ctx, fmt.Sprintf("mkdir -p %s && tar xf %s -C %s", dir, remote, dir), os.Stderr, os.Stderr); err != nil {
		return err
	}
	var raw bytes.Buffer
	line := fmt.Sprintf("%s/%s -on-host %s -rounds %d -workloads %s -profile=%t", dir, programName, dir, o.rounds, o.workloads, o.profile)
	if err := h.Shell(ctx, line, &raw, os.Stderr); err != nil {
		return err
	}
	host, err := h.Describe(ctx)
	if err != nil {
		return err
	}
	figures, err := parseFigures(raw.String())
	if err != nil {
		return err
	}
	fmt.Printf("host: %s\nguest: vCPU 1, %d MiB, Debian kernel, workload as init; QEMU: -M microvm, its disk a temporary qcow2 layer over the same file; %d rounds in turns, medians\n\n",
		host, memoryMiB, o.rounds)
	return report(os.Stdout, figures, o.least)
}

func pack(ctx context.Context, h *onhost.Host, archive string) error {
	program, err := h.Build(ctx, "./tools/devbench")
	if err != nil {
		return err
	}
	guest, err := h.Build(ctx, "./tools/devbench/guest")
	if err != nil {
		return err
	}
	f, err := os.Create(archive)
	if err != nil {
		return err
	}
	return errors.Join(writeBundle(ctx, f, program, guest), f.Close())
}
