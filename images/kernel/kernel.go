// Package kernel gets the unmodified Debian cloud kernel with the machine's own apt, and takes out of it what a microVM
// needs: the ELF kernel, which is entered directly without inflating itself at every boot, and the loadable modules.
package kernel

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/rs/zerolog"

	"torpor/images/cache"
	"torpor/images/command"
)

// metaPackage always depends on the newest kernel of its kind.
const metaPackage = "linux-image-cloud-amd64"

// alias names, in the cache, the kernel that was resolved last; while it is there nothing asks apt.
const alias = "kernel-current"

// Package is an unpacked kernel in the cache: kernel-<version>/{vmlinuz,vmlinux,lib/modules/<release>/...}.
type Package struct {
	Dir     string
	Version string // of the Debian package, e.g. 6.1.192-3
	Release string // as uname -r says, e.g. 6.1.0-57-cloud-amd64
}

// Vmlinux is the path of the ELF kernel.
func (p Package) Vmlinux() string { return filepath.Join(p.Dir, "vmlinux") }

// Vmlinuz is the path of the kernel as Debian ships it.
func (p Package) Vmlinuz() string { return filepath.Join(p.Dir, "vmlinuz") }

// ModulesDir is the directory of the modules.
func (p Package) ModulesDir() string { return filepath.Join(p.Dir, "lib/modules", p.Release) }

// Ensure gives the cached kernel, or fetches it. With refresh it asks apt for the newest version first.
// The caller holds the store's lock.
func Ensure(ctx context.Context, log zerolog.Logger, store *cache.Store, refresh bool) (Package, error) {
	if name, ok := store.Follow(alias); ok && !refresh {
		if p, err := open(store, name); err == nil {
			return p, nil
		}
	}
	image, version, err := resolve(ctx, log, refresh)
	if err != nil {
		return Package{}, fmt.Errorf("find the guest kernel: %w", err)
	}
	name := "kernel-" + version
	if _, err := os.Stat(store.Path(name)); errors.Is(err, os.ErrNotExist) {
		log.Info().Str("package", image).Str("version", version).Msg("fetching the guest kernel")
		if _, err := store.Publish(name, func(dir string) error { return fetch(ctx, dir, image, version) }); err != nil {
			return Package{}, fmt.Errorf("get the guest kernel: %w", err)
		}
	}
	p, err := open(store, name)
	if err != nil {
		return Package{}, err
	}
	return p, store.Point(alias, name)
}

// open checks an entry and adds the ELF kernel where another program has put the rest there without it.
func open(store *cache.Store, name string) (Package, error) {
	p := Package{Dir: store.Path(name), Version: strings.TrimPrefix(name, "kernel-")}
	releases, err := os.ReadDir(filepath.Join(p.Dir, "lib/modules"))
	if err != nil || len(releases) != 1 {
		return Package{}, fmt.Errorf("%s is not an unpacked kernel: remove it and try again", p.Dir)
	}
	p.Release = releases[0].Name()
	if _, err := os.Stat(p.Vmlinux()); err == nil {
		return p, nil
	}
	return p, extract(p)
}

// extract writes vmlinux beside vmlinuz, by a rename so that nobody sees half of it.
func extract(p Package) (err error) {
	image, err := os.ReadFile(p.Vmlinuz())
	if err != nil {
		return fmt.Errorf("read the kernel: %w", err)
	}
	vmlinux, err := ExtractVmlinux(image)
	if err != nil {
		return fmt.Errorf("extract %s: %w", p.Vmlinuz(), err)
	}
	tmp, err := os.CreateTemp(p.Dir, ".vmlinux-")
	if err != nil {
		return fmt.Errorf("write the kernel: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("write the kernel: %w", err), os.Remove(tmp.Name()))
		}
	}()
	_, werr := tmp.Write(vmlinux)
	if err := errors.Join(werr, tmp.Chmod(0o444), tmp.Sync(), tmp.Close()); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), p.Vmlinux())
}

// resolve asks apt which package the meta package stands for now.
func resolve(ctx context.Context, log zerolog.Logger, refresh bool) (image, version string, err error) {
	if !refresh {
		if image, version, err = show(ctx); err == nil {
			return image, version, nil
		}
	}
	log.Info().Msg("reading the machine's package lists anew (apt-get update)")
	if _, err := command.Run(ctx, command.Command{Name: "apt-get", Args: []string{"-q", "update"}}); err != nil {
		return "", "", err
	}
	return show(ctx)
}

func show(ctx context.Context) (image, version string, err error) {
	out, err := command.Run(ctx, command.Command{Name: "apt-cache", Args: []string{"show", "--no-all-versions", metaPackage}})
	if err != nil {
		return "", "", err
	}
	return parseShow(string(out.Stdout))
}

// parseShow reads the package and version out of the meta package's "Depends: linux-image-... (= version)".
func parseShow(record string) (image, version string, err error) {
	for line := range strings.Lines(record) {
		value, ok := strings.CutPrefix(line, "Depends:")
		if !ok {
			continue
		}
		fields := strings.Fields(value)
		if len(fields) == 3 && strings.HasPrefix(fields[0], "linux-image-") && fields[1] == "(=" {
			version = strings.TrimSuffix(fields[2], ")")
			if version == "" || strings.ContainsAny(version, "/\x00") {
				break
			}
			return fields[0], version, nil
		}
	}
	return "", "", fmt.Errorf("apt does not say which kernel %s stands for", metaPackage)
}

// fetch downloads and unpacks a kernel package into dir.
func fetch(ctx context.Context, dir, image, version string) (err error) {
	scratch, err := os.MkdirTemp(dir, "deb-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(scratch)) }()
	// The scratch directory is root's, so apt must not step down to its own user to write there.
	args := []string{"-q", "-o", "APT::Sandbox::User=root", "download", image + "=" + version}
	if _, err := command.Run(ctx, command.Command{Name: "apt-get", Args: args, Dir: scratch}); err != nil {
		return err
	}
	debs, err := filepath.Glob(filepath.Join(scratch, "*.deb"))
	if err != nil || len(debs) != 1 {
		return fmt.Errorf("apt-get download left %d packages", len(debs))
	}
	tree := filepath.Join(scratch, "tree")
	if _, err := command.Run(ctx, command.Command{Name: "dpkg-deb", Args: []string{"--extract", debs[0], tree}}); err != nil {
		return err
	}
	release := strings.TrimPrefix(image, "linux-image-")
	if err := os.Rename(filepath.Join(tree, "boot/vmlinuz-"+release), filepath.Join(dir, "vmlinuz")); err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Join(dir, "lib"), 0o755); err != nil {
		return err
	}
	return os.Rename(filepath.Join(tree, "lib/modules"), filepath.Join(dir, "lib/modules"))
}
