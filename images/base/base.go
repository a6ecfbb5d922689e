// Package base builds the guest's root file system from Debian packages: mmdebstrap fills a directory, and an ext4 image
// is made of it in which nothing depends on when or where it was made.
package base

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/rs/zerolog"
	"golang.org/x/sys/unix"

	"torpor/images/cache"
	"torpor/images/command"
	"torpor/images/imageset"
)

const (
	imageName  = "rootfs.ext4"
	recordName = "rootfs.json"

	// needBytes is what a build takes at its peak: the tree, the image and the packages themselves.
	needBytes = 1 << 30
)

// RootFS is a built root file system in the cache.
type RootFS struct {
	Path     string   `json:"-"`
	Bytes    int64    `json:"-"`        // virtual size of the image
	Digest   string   `json:"digest"`   // "sha256:<hex>" of the image
	Packages []string `json:"packages"` // "name version", sorted
}

// Ensure gives the cached root file system of the current recipe, or builds it. What is there is used without asking
// anybody for newer packages; refresh builds anew from the newest, and fails if the same packages gave another image.
// The caller holds the store's lock.
func Ensure(ctx context.Context, log zerolog.Logger, store *cache.Store, refresh bool) (RootFS, error) {
	alias := "rootfs-recipe-" + recipeHash()
	if name, ok := store.Follow(alias); ok && !refresh {
		if r, err := open(store, name); err == nil {
			return r, nil
		}
	}
	if err := checkMachine(store.Root()); err != nil {
		return RootFS{}, err
	}
	log.Info().Msg("building the guest's root file system from Debian packages: a few minutes")
	built, name, err := build(ctx, log, store)
	if err != nil {
		return RootFS{}, fmt.Errorf("build the guest's root file system: %w", err)
	}
	r, err := open(store, name)
	if err != nil {
		return RootFS{}, err
	}
	if r.Digest != built.Digest {
		return RootFS{}, fmt.Errorf("the build is not reproducible: the same packages gave %s now and %s before (%s)",
			built.Digest, r.Digest, r.Path)
	}
	return r, store.Point(alias, name)
}

// checkMachine says early, in one sentence, why a build cannot work here.
func checkMachine(dir string) error {
	if os.Geteuid() != 0 {
		return errors.New("building the guest's root file system needs root: run it again with sudo")
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("free space of %s: %w", dir, err)
	}
	if free := st.Bavail * uint64(st.Bsize); free < needBytes {
		return fmt.Errorf("%s has %d MB free and a build takes %d: %w", dir, free>>20, needBytes>>20, unix.ENOSPC)
	}
	return nil
}

func open(store *cache.Store, name string) (RootFS, error) {
	dir := store.Path(name)
	b, err := os.ReadFile(filepath.Join(dir, recordName))
	if err != nil {
		return RootFS{}, fmt.Errorf("read the cached root file system: %w", err)
	}
	r := RootFS{Path: filepath.Join(dir, imageName)}
	if err := json.Unmarshal(b, &r); err != nil {
		return RootFS{}, fmt.Errorf("%s: %w", filepath.Join(dir, recordName), err)
	}
	info, err := os.Stat(r.Path)
	if err != nil {
		return RootFS{}, fmt.Errorf("read the cached root file system: %w", err)
	}
	r.Bytes = info.Size()
	return r, nil
}

// build makes the image and publishes it under the name that its packages give it.
func build(ctx context.Context, log zerolog.Logger, store *cache.Store) (r RootFS, name string, err error) {
	work, remove, err := store.Temp()
	if err != nil {
		return RootFS{}, "", err
	}
	defer func() { err = errors.Join(err, remove()) }()

	started := time.Now()
	tree := filepath.Join(work, "tree")
	if err := bootstrap(ctx, work, tree); err != nil {
		return RootFS{}, "", err
	}
	if r.Packages, err = installed(ctx, tree); err != nil {
		return RootFS{}, "", err
	}
	log.Info().Int("packages", len(r.Packages)).Dur("took", time.Since(started)).Msg("packages are unpacked; making the disk image")

	image := filepath.Join(work, imageName)
	if err := disk.write(ctx, image, tree, started); err != nil {
		return RootFS{}, "", err
	}
	if r.Digest, err = imageset.HashFile(image); err != nil {
		return RootFS{}, "", err
	}
	name = "rootfs-" + rootfsKey(recipeHash(), r.Packages)
	r.Path, err = store.Publish(name, func(dir string) error { return r.fill(dir, image) })
	return r, name, err
}

// fill moves the image into its directory and writes the record beside it.
func (r RootFS) fill(dir, image string) error {
	target := filepath.Join(dir, imageName)
	if err := os.Rename(image, target); err != nil {
		return err
	}
	if err := os.Chmod(target, 0o444); err != nil {
		return err
	}
	record, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, recordName), append(record, '\n'), 0o444)
}

// bootstrap fills tree with the packages and runs the customize script on it.
func bootstrap(ctx context.Context, work, tree string) error {
	list, err := sources(ctx)
	if err != nil {
		return err
	}
	options, err := acquireOptions(ctx)
	if err != nil {
		return err
	}
	hook := filepath.Join(work, "customize.sh")
	if err := os.WriteFile(hook, []byte(customizeScript), 0o700); err != nil {
		return err
	}
	args := []string{
		"--mode=root", "--variant=apt", "--format=directory", "--architectures=amd64",
		"--include=" + strings.Join(packages, ","), "--customize-hook=" + hook,
	}
	for _, o := range dpkgOptions {
		args = append(args, "--dpkgopt="+o)
	}
	for _, o := range options {
		args = append(args, "--aptopt="+o)
	}
	_, err = command.Run(ctx, command.Command{
		Name:     "mmdebstrap",
		Args:     append(args, suite, tree, "-"),
		Stdin:    strings.NewReader(strings.Join(list, "\n") + "\n"),
		Env:      []string{fmt.Sprintf("SOURCE_DATE_EPOCH=%d", epoch), "TMPDIR=" + work},
		Confined: true,
	})
	return err
}

// installed lists the packages of a tree with their versions.
func installed(ctx context.Context, tree string) ([]string, error) {
	out, err := command.Run(ctx, command.Command{
		Name: "dpkg-query",
		Args: []string{"--admindir=" + filepath.Join(tree, "var/lib/dpkg"), "--show", "--showformat=${Package} ${Version}\n"},
	})
	if err != nil {
		return nil, err
	}
	lines := strings.Split(strings.TrimSpace(string(out.Stdout)), "\n")
	slices.Sort(lines)
	return lines, nil
}
