package main

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/rs/zerolog"

	"torpor/images/cache"
	"torpor/images/initramfs"
	"torpor/images/kernel"
	"torpor/tools/hostvm"
)

// Names inside a bundle, which is all that the measurement needs on the host.
const (
	qemuName    = "qemu-system-x86_64"
	libDir      = "lib"
	biosDir     = "qemu"
	modulesDir  = "modules" // host modules that QEMU wants, in the order of loading by their number
	initrdName  = "initrd"
	kernelName  = "vmlinux"
	programName = "devbench"
)

// guestModules are the drivers of the devices measured; hostModules is QEMU's vsock, which is the kernel's.
var (
	guestModules = []string{"virtio_mmio", "virtio_blk", "virtio_net", "vmw_vsock_virtio_transport"}
	hostModules  = []string{"vhost_vsock"}
)

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
	b := &bundle{w: tar.NewWriter(w)}
	b.file(programName, program, 0o755)
	b.file(kernelName, k.Vmlinux(), 0o644)
	if err := b.initrd(modules, guest); err != nil {
		return err
	}
	drivers, err := modules.Closure(hostModules...)
	if err != nil {
		return err
	}
	for i, m := range drivers {
		b.file(fmt.Sprintf("%s/%02d-%s", modulesDir, i, filepath.Base(m)), m, 0o644)
	}
	if err := b.qemu(ctx); err != nil {
		return err
	}
	return errors.Join(b.err, b.w.Close())
}

// bundle is an archive being written; the first error sticks.
type bundle struct {
	w   *tar.Writer
	err error
}

func (b *bundle) file(name, from string, mode int64) {
	if b.err != nil {
		return
	}
	content, err := os.ReadFile(from)
	if err == nil {
		err = b.w.WriteHeader(&tar.Header{Name: name, Mode: mode, Size: int64(len(content))})
	}
	if err == nil {
		_, err = b.w.Write(content)
	}
	b.err = err
}

func (b *bundle) initrd(modules *kernel.Modules, guest string) error {
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
		b.file(initrdName, f.Name(), 0o644)
	}
	return err
}

// qemu takes the machine's own QEMU: the program, the libraries it is linked with and its firmware.
func (b *bundle) qemu(ctx context.Context) error {
	program, err := exec.LookPath(qemuName)
	if err != nil {
		return fmt.Errorf("the peer is missing: %w", err)
	}
	b.file(qemuName, program, 0o755)
	out, err := exec.CommandContext(ctx, "ldd", program).Output()
	if err != nil {
		return fmt.Errorf("listing the libraries of %s: %w", program, err)
	}
	for field := range strings.FieldsSeq(string(out)) {
		if strings.HasPrefix(field, "/") {
			b.file(libDir+"/"+filepath.Base(field), field, 0o755)
		}
	}
	for _, dir := range []string{"/usr/share/qemu", "/usr/share/seabios"} {
		entries, err := os.ReadDir(dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		for _, e := range entries {
			if ext := filepath.Ext(e.Name()); ext == ".rom" || ext == ".bin" {
				if _, err := os.Stat(filepath.Join(dir, e.Name())); err == nil { // some are links into packages that are not there
					b.file(biosDir+"/"+e.Name(), filepath.Join(dir, e.Name()), 0o644)
				}
			}
		}
	}
	return nil
}
