// Package qemupeer brings this machine's QEMU to a host that has none, to be measured beside: the program, what it is linked with, its
// firmware, and the host's kernel modules it wants.
package qemupeer

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
	"torpor/images/kernel"
	"torpor/tools/hostvm"
)

// Names inside an archive.
const (
	program    = "qemu-system-x86_64"
	libDir     = "lib"
	biosDir    = "qemu"
	modulesDir = "modules" // host modules, in the order of loading by their number
)

// hostModules is QEMU's vsock, which is the kernel's.
var hostModules = []string{"vhost_vsock"}

// Archive is a tar archive being written; the first error sticks.
type Archive struct {
	w   *tar.Writer
	err error
}

// File adds a file of this machine.
func (b *Archive) File(name, from string, mode int64) {
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

// QEMU adds the machine's own QEMU: the program, the libraries it is linked with and its firmware.
func (b *Archive) QEMU(ctx context.Context) error {
	path, err := exec.LookPath(program)
	if err != nil {
		return fmt.Errorf("the peer is missing: %w", err)
	}
	b.File(program, path, 0o755)
	out, err := exec.CommandContext(ctx, "ldd", path).Output()
	if err != nil {
		return fmt.Errorf("listing the libraries of %s: %w", path, err)
	}
	for field := range strings.FieldsSeq(string(out)) {
		if strings.HasPrefix(field, "/") {
			b.File(libDir+"/"+filepath.Base(field), field, 0o755)
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
					b.File(biosDir+"/"+e.Name(), filepath.Join(dir, e.Name()), 0o644)
				}
			}
		}
	}
	return nil
}

// Modules adds the host modules of the kernel that guests and emulated hosts have.
func (b *Archive) Modules(ctx context.Context) error {
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
	drivers, err := modules.Closure(hostModules...)
	if err != nil {
		return err
	}
	for i, m := range drivers {
		b.File(fmt.Sprintf("%s/%02d-%s", modulesDir, i, filepath.Base(m)), m, 0o644)
	}
	return nil
}

// NewArchive begins one.
func NewArchive(w io.Writer) *Archive { return &Archive{w: tar.NewWriter(w)} }

// Close ends the archive and returns the first error there was.
func (b *Archive) Close() error { return errors.Join(b.err, b.w.Close()) }
