// Package disk makes the disks of sandboxes: copy-on-write layers (vmm/cow) over a read-only base. A layer is written by one
// VMM while it is the top, and never changes afterwards.
package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"torpor/vmm/cow"
)

// Layers makes layers. It holds nothing and is safe for concurrent use.
type Layers struct{}

// Create makes an empty layer for a disk of virtualSize bytes. It takes a few KiB whatever the size. It is durable, with
// its directory entry, when it returns.
func (Layers) Create(path string, virtualSize uint64) error {
	if virtualSize > 1<<62 {
		return fmt.Errorf("create disk layer: a virtual size of %d bytes", virtualSize)
	}
	if err := cow.Create(path, int64(virtualSize)); err != nil {
		return err
	}
	if err := syncPath(path); err != nil { // a file or a directory: it is the same
		return err
	}
	return syncPath(filepath.Dir(path))
}

// Merge writes one layer with the contents of several, oldest first, none of which may be being written. It is durable when it
// returns. Once begun it is finished whatever becomes of ctx: it is short, and a half merged file is of no use.
func (Layers) Merge(ctx context.Context, dst string, layers []string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := cow.Merge(dst, layers...); err != nil {
		return err
	}
	return syncPath(filepath.Dir(dst))
}

// Seal adds checksums to a layer that nobody writes any more, for Check; `torpor disk inspect --verify` compares them too. It reads
// all that the layer stores. Once begun it is finished whatever becomes of ctx. A layer that is open for writing stays as it is.
func (Layers) Seal(ctx context.Context, path string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if untouched(path) {
		return nil
	}
	err := cow.Seal(path)
	if errors.Is(err, cow.ErrInUse) {
		return nil
	}
	if err == nil {
		err = os.Chtimes(path, time.Time{}, Untouched)
	}
	return err
}

// Untouched is the time of modification that a sealed layer is given: whatever writes to it afterwards changes that.
var Untouched = time.Unix(1_000_000_000, 0)

func untouched(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.ModTime().Equal(Untouched)
}

// Check refuses a layer that cannot be opened or, if it was sealed and something has written to it since, that is not what it was
// then: only in that case it is read whole. Errors of damage are *cow.CorruptError.
func (Layers) Check(path string) error {
	if untouched(path) {
		return nil
	}
	info, err := cow.Inspect(path)
	if err != nil || !info.Sealed {
		return err
	}
	if err := cow.Verify(path); err != nil {
		return err
	}
	return os.Chtimes(path, time.Time{}, Untouched)
}

// Free returns the bytes the agent may still write on path's file system (statfs(2), f_bavail).
func (Layers) Free(path string) (uint64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return 0, &os.PathError{Op: "statfs", Path: path, Err: err}
	}
	return st.Bavail * uint64(st.Bsize), nil
}

func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// Evict drops what the page cache has of a file that is durable, except for what somebody has mapped.
func (Layers) Evict(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("drop a file from the page cache: %w", err)
	}
	defer f.Close()
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		return fmt.Errorf("drop %s from the page cache: %w", path, os.NewSyscallError("fadvise64", err))
	}
	return nil
}
