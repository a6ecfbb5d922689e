// Package build puts a guest image set together from its parts and keeps it in the cache under the digest of them all.
package build

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/rs/zerolog"

	"torpor/images/base"
	"torpor/images/cache"
	"torpor/images/imageset"
	"torpor/images/initramfs"
	"torpor/images/kernel"
)

// EnvdVersion is the version of E2B's envd whose API ours speaks; SDKs decide by it which calls to use.
const EnvdVersion = "0.6.13"

// cmdline is the guest's kernel command line. The console is the VMM's bounded log; a guest that fails resets itself, which
// ends its VMM; panic_warm is how the VMM tells a panic from a reboot (vmm/machine, End). Self-tests of the crypto code and probing for hardware that is not there would only cost time.
const cmdline = "console=ttyS0 8250.nr_uarts=1 quiet loglevel=1 reboot=t,panic_warm panic=-1 cryptomgr.notests random.trust_cpu=on tsc=reliable " +
	"clocksource=kvm-clock i8042.noaux i8042.nokbd pci=off swiotlb=noforce mitigations=off"

// modules are what the guest must load to see its devices; what they need comes with them. ext4 is built in.
var modules = []string{"virtio_mmio", "virtio_blk", "virtio_rng", "virtio_balloon", "vmw_vsock_virtio_transport", "virtio_net"}

// Names of the files in a set.
const (
	vmlinuxName = "vmlinux"
	initrdName  = "initrd"
	rootfsName  = "rootfs.ext4"
	envdPart    = "envd"
)

// Options says what to build.
type Options struct {
	Cache   string // directory of the cache
	Envd    string // path of the envd binary
	Refresh bool   // take the newest kernel and packages, not those of the last build
}

// Build makes the image set "base", or finds it in the cache, and gives its directory.
func Build(ctx context.Context, log zerolog.Logger, o Options) (dir string, err error) {
	// Before minutes are spent on the rest: a wrong envd is found at once.
	if err := checkEnvd(o.Envd); err != nil {
		return "", err
	}
	store, err := cache.Open(o.Cache)
	if err != nil {
		return "", err
	}
	unlock, err := store.Lock(ctx)
	if err != nil {
		return "", err
	}
	defer unlock()

	k, err := kernel.Ensure(ctx, log, store, o.Refresh)
	if err != nil {
		return "", err
	}
	root, err := base.Ensure(ctx, log, store, o.Refresh)
	if err != nil {
		return "", err
	}
	return assemble(log, store, k, root, o.Envd)
}

func checkEnvd(path string) error {
	content, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("no envd binary: build it first or name it with --envd: %w", err)
	}
	if err := initramfs.CheckStatic(content); err != nil {
		return fmt.Errorf("%s cannot be the guest's init: %w", path, err)
	}
	return nil
}

// assemble makes a set of its parts.
func assemble(log zerolog.Logger, store *cache.Store, k kernel.Package, root base.RootFS, envd string) (string, error) {
	initrd, err := makeInitrd(k, envd)
	if err != nil {
		return "", err
	}
	m, err := describe(k, root, initrd, envd)
	if err != nil {
		return "", err
	}
	return publish(log, store, m, k, root, initrd)
}

func makeInitrd(k kernel.Package, envd string) ([]byte, error) {
	all, err := kernel.OpenModules(k.ModulesDir())
	if err != nil {
		return nil, err
	}
	files, err := all.Closure(modules...)
	if err != nil {
		return nil, fmt.Errorf("choose the guest's kernel modules: %w", err)
	}
	var b bytes.Buffer
	if err := initramfs.Write(&b, initramfs.Inputs{Envd: envd, Modules: files}); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// describe hashes the parts. The root file system's digest was taken when it was built: reading 4 GiB again at every run is
// what the cache is there to save; imageset.Verify does read it.
func describe(k kernel.Package, root base.RootFS, initrd []byte, envd string) (imageset.Manifest, error) {
	vmlinuxDigest, err := imageset.HashFile(k.Vmlinux())
	if err != nil {
		return imageset.Manifest{}, err
	}
	envdDigest, err := imageset.HashFile(envd)
	if err != nil {
		return imageset.Manifest{}, err
	}
	initrdSum := sha256.Sum256(initrd)
	m := imageset.Manifest{
		Name: "base", Kernel: k.Version, Cmdline: cmdline, EnvdVersion: EnvdVersion, DiskBytes: root.Bytes,
		Vmlinux: vmlinuxName, Initrd: initrdName, RootFS: rootfsName,
		Parts: map[string]string{
			vmlinuxName: vmlinuxDigest,
			initrdName:  "sha256:" + hex.EncodeToString(initrdSum[:]),
			rootfsName:  root.Digest,
			envdPart:    envdDigest,
		},
	}
	return m, m.Seal()
}

// publish gives the set its directory. Kernel and root file system are further names of the cache's own files: no copy.
func publish(log zerolog.Logger, store *cache.Store, m imageset.Manifest, k kernel.Package, root base.RootFS, initrd []byte) (string, error) {
	name := "images-" + m.ShortDigest()
	if old, err := imageset.Read(store.Path(name)); err == nil && old.Digest == m.Digest {
		return store.Path(name), nil
	}
	log.Info().Str("digest", m.Digest).Msg("new image set")
	return store.Publish(name, func(dir string) error {
		return errors.Join(
			os.Link(k.Vmlinux(), filepath.Join(dir, m.Vmlinux)),
			os.Link(root.Path, filepath.Join(dir, m.RootFS)),
			os.WriteFile(filepath.Join(dir, m.Initrd), initrd, 0o444),
			m.Write(dir),
		)
	})
}
