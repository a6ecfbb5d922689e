package hostvm

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"torpor/images/imageset"
)

// makeImageDisk makes the read-only file system that holds an image set, or answers the one made before, and removes
// those of other sets that no instance names. The caller holds the lock on root's image disks.
func makeImageDisk(ctx context.Context, root, dir string, set imageset.Manifest) (string, error) {
	path := filepath.Join(root, "images-"+set.ShortDigest()+".ext4")
	if exists(path) {
		return path, nil
	}
	size, err := occupied(dir)
	if err != nil {
		return "", fmt.Errorf("image set %s: %w", dir, err)
	}
	if err := needFree(root, size+freeMargin); err != nil {
		return "", err
	}
	tmp := path + ".tmp"
	if err := sparseFile(tmp, size+size/8+64<<20); err != nil {
		return "", err
	}
	defer func() { _ = os.Remove(tmp) }() // gone if it got its name
	// No journal and no spare blocks: nobody writes to it.
	if _, err := output(ctx, "", "mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-L", "images", "-d", dir, tmp); err != nil {
		return "", fmt.Errorf("make a disk of image set %s: %w", dir, err)
	}
	if err := os.Rename(tmp, path); err != nil {
		return "", err
	}
	return path, removeStaleImageDisks(root, path)
}

// occupied adds up what the files under dir take on disk, in bytes.
func occupied(dir string) (bytes int64, err error) {
	err = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			return &os.PathError{Op: "stat", Path: path, Err: err}
		}
		bytes += st.Blocks * 512
		return nil
	})
	return bytes, err
}

func removeStaleImageDisks(root, keep string) error {
	used := map[string]bool{keep: true}
	states, err := filepath.Glob(filepath.Join(root, "*", stateFile))
	if err != nil {
		return err
	}
	for _, f := range states {
		if st, err := readState(f); err == nil {
			used[st.ImageDisk] = true
		}
	}
	disks, err := filepath.Glob(filepath.Join(root, "images-*.ext4"))
	if err != nil {
		return err
	}
	for _, d := range disks {
		if !used[d] {
			if err := os.Remove(d); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
	return nil
}

// makeDataDisk makes the instance's persistent disk, a sparse file with an empty ext4, unless it is there.
func makeDataDisk(ctx context.Context, path string, gib int) error {
	if exists(path) {
		return nil
	}
	tmp := path + ".tmp"
	if err := sparseFile(tmp, int64(gib)<<30); err != nil {
		return err
	}
	defer func() { _ = os.Remove(tmp) }() // gone if it got its name
	if _, err := output(ctx, "", "mke2fs", "-q", "-F", "-t", "ext4", "-m", "0", "-L", "data",
		"-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard", tmp); err != nil {
		return fmt.Errorf("make the data disk: %w", err)
	}
	return os.Rename(tmp, path)
}

func sparseFile(path string, size int64) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	if err := f.Truncate(size); err != nil {
		_ = f.Close()
		return err
	}
	return f.Close()
}

// needFree fails with a sentence that says what to do if fewer than need bytes are free where dir is.
func needFree(dir string, need int64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	free := int64(st.Bavail) * st.Bsize
	if free >= need {
		return nil
	}
	return fmt.Errorf("%s has %d MiB free and the emulated host needs %d: free some, or set TORPOR_CACHE to a directory on another disk",
		dir, free>>20, need>>20)
}
