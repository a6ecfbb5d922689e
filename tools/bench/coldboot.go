package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"torpor/agent/cell"
	"torpor/agent/guest"
	"torpor/agent/vmproc"
	"torpor/api/vmmpb"
	"torpor/images/imageset"
	"torpor/vmm/cow"
)

const (
	guestCID    = 3
	machineName = "cold"
)

// booter boots the template's own image cold, the way the agent builds the template: same VMM, shape, handshake and first
// command. It leaves the control plane and the agent out, which only flatters the cold boot.
type booter struct {
	dir      string
	imageDir string
	image    imageset.Manifest
	shape    shape
	vmms     *vmproc.Supervisor
}

func newBooter(o options, s shape) (*booter, error) {
	imageDir := filepath.Join(o.data, "images", "base")
	image, err := imageset.Read(imageDir)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(o.data, "bench-")
	if err != nil {
		return nil, fmt.Errorf("making a directory for the cold boot: %w", err)
	}
	cells, err := cell.Open(cell.DefaultConfig)
	if err != nil {
		return nil, err
	}
	vmms := &vmproc.Supervisor{Binary: o.vmm, RunDir: filepath.Join(dir, "run"), KVM: "/dev/kvm", Cells: cells}
	return &booter{dir, imageDir, image, s, vmms}, nil
}

func (b *booter) close() { _ = os.RemoveAll(b.dir) } // what stays is only litter, and the next line tells of real faults

// measure makes one machine, from nothing to the output of its first command.
func (b *booter) measure(ctx context.Context) (s sample) {
	s = sample{scenario: coldBoot}
	if s.err = quiet(ctx); s.err != nil {
		return s
	}
	w := watch{began: time.Now()}
	s.err = b.boot(ctx, &w)
	s.phases, s.total = w.phases, w.total()
	return s
}

func (b *booter) boot(ctx context.Context, w *watch) (err error) {
	layer := filepath.Join(b.dir, "layer")
	if err := cow.Create(layer, b.image.DiskBytes); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.Remove(layer)) }()
	vm, err := b.vmms.Start(ctx, machineName, filepath.Join(b.dir, "vmm.log"))
	if err != nil {
		return err
	}
	defer func() {
		stop := context.WithoutCancel(ctx)
		err = errors.Join(err, vm.Kill(stop), b.vmms.Clear(machineName))
	}()
	w.lap("vmm")
	socket := b.vmms.VsockSocket(machineName)
	hello, err := guest.ListenHello(socket)
	if err != nil {
		return err
	}
	defer hello.Close()
	_, err = vm.Boot(ctx, &vmmpb.BootRequest{
		Machine: &vmmpb.Machine{
			Vcpus: uint32(b.shape.vcpus), MemoryBytes: uint64(b.shape.memoryMiB) << 20,
			Disks:   []*vmmpb.Disk{{Id: "root", Base: filepath.Join(b.imageDir, b.image.RootFS), Top: layer}},
			Vsock:   &vmmpb.Vsock{Cid: guestCID},
			Console: &vmmpb.Console{Enabled: true, Log: filepath.Join(b.dir, "console.log")},
		},
		Kernel:  filepath.Join(b.imageDir, b.image.Vmlinux),
		Initrd:  filepath.Join(b.imageDir, b.image.Initrd),
		Cmdline: b.image.Cmdline,
	})
	if err != nil {
		return fmt.Errorf("boot: %w", err)
	}
	if _, err := hello.Wait(ctx); err != nil {
		return err
	}
	w.lap("kernel+envd")
	return ready(ctx, guest.At(socket), w)
}
