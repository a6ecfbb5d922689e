package main

import (
	"context"
	"errors"
	"io"
	"os"

	"github.com/rs/zerolog"

	"torpor/images/cache"
	"torpor/images/initramfs"
	"torpor/images/kernel"
	"torpor/tools/hostvm"
	"torpor/tools/qemupeer"
)

// Names inside a bundle, which is all that the measurement needs on the host.
const (
	initrdName  = "initrd"
	kernelName  = "vmlinux"
	programName = "devbench"
)

// guestModules are the drivers of the devices measured.
var guestModules = []string{"virtio_mmio", "virtio_blk", "virtio_net", "vmw_vsock_virtio_transport"}

// writeBundle writes a tar archive of everything, found on this machine.
func writeBundle(ctx context.Context, w io.Writer, program, guest string) error {
	dir, err := hostvm.CacheDir()
	if err != nil {
		return err
	}
	store, err := cache.Open(dir)
	if err != nil {
		return err
	}
	k, err := kernel.Ensure(ctx, zerolog.Nop(), store, false)
	if err != nil {
		return err
	}
	modules, err := kernel.OpenModules(k.ModulesDir())
	if err != nil {
		return err
	}
	b := qemupeer.NewArchive(w)
	b.File(programName, program, 0o755)
	b.File(kernelName, k.Vmlinux(), 0o644)
	if err := addInitrd(b, modules, guest); err != nil {
		return err
	}
	return errors.Join(b.Modules(ctx), b.QEMU(ctx), b.Close())
}

func addInitrd(b *qemupeer.Archive, modules *kernel.Modules, guest string) error {
	files, err := modules.Closure(guestModules...)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp("", "devbench-initrd-")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }()
	err = errors.Join(initramfs.Write(f, initramfs.Inputs{Envd: guest, Modules: files}), f.Close())
	if err == nil {
		b.File(initrdName, f.Name(), 0o644)
	}
	return err
}
