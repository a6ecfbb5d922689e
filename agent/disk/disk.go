// Package disk makes the disks of sandboxes: copy-on-write layers (vmm/cow) over a read-only base. A layer is written by one
// VMM while it is the top, and never changes afterwards.
package disk

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"torpor/vmm/cow"
)

// Layers makes layers. It holds nothing and is safe for concurrent use.
type Layers struct{}

// Create makes an empty layer for a disk of virtualSize bytes. It takes a few KiB whatever the size. The directory entry is
// durable when it returns.
func (Layers) Create(path string, virtualSize uint64) error {
	if virtualSize > 1<<62 {
		return fmt.Errorf("create disk layer: a virtual size of %d bytes", virtualSize)
	}
	if err := cow.Create(path, int64(virtualSize)); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
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
	return syncDir(filepath.Dir(dst))
}

// Seal adds checksums to a layer that nobody writes any more; `torpor disk inspect --verify` compares them. It reads all that
// the layer stores. Once begun it is finished whatever becomes of ctx.
func (Layers) Seal(ctx context.Context, path string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return cow.Seal(path)
}

// Free returns the bytes the agent may still write on path's file system (statfs(2), f_bavail).
func (Layers) Free(path string) (uint64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return 0, &os.PathError{Op: "statfs", Path: path, Err: err}
	}
	return st.Bavail * uint64(st.Bsize), nil
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}
