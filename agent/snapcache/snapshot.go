package snapcache

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// Snapshot is a published snapshot.
type Snapshot struct {
	Dir      string
	Manifest Manifest
}

// Path returns the path of a file of the snapshot.
func (s *Snapshot) Path(name string) string { return filepath.Join(s.Dir, name) }

// file returns a file's entry.
func (s *Snapshot) file(name string) (File, bool) {
	for _, f := range s.Manifest.Files {
		if f.Name == name {
			return f, true
		}
	}
	return File{}, false
}

// AllocatedBytes is what the snapshot takes on the disk.
func (s *Snapshot) AllocatedBytes() uint64 {
	var sum uint64
	for _, f := range s.Manifest.Files {
		sum += Allocated(s.Path(f.Name))
	}
	return sum
}

// Allocated returns the bytes a file takes on the disk, 0 if there is none.
func Allocated(path string) uint64 {
	info, err := os.Stat(path)
	if err != nil {
		return 0
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return uint64(st.Blocks) * 512 // stat(2): always in units of 512 bytes
	}
	return uint64(info.Size())
}

// Manifested reads the manifest of the snapshot in dir alone. Errors are ErrNotExist, ErrVersion or ErrCorrupt.
func Manifested(dir string) (Manifest, error) { return readManifest(dir) }

// Load reads the manifest of the snapshot in dir and checks that every file is there in its size. Contents are checked by
// Verify. Errors are ErrNotExist, ErrVersion or ErrCorrupt (as *PartError).
func Load(dir string) (*Snapshot, error) {
	m, err := readManifest(dir)
	if err != nil {
		return nil, err
	}
	for _, f := range m.Files {
		info, err := os.Stat(filepath.Join(dir, f.Name))
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil, &PartError{dir, f.Name, "the file is missing"}
		case err != nil:
			return nil, fmt.Errorf("snapshot %s: %w", filepath.Base(dir), err)
		case info.Size() != f.Size:
			return nil, &PartError{dir, f.Name, fmt.Sprintf("it has %d bytes, the manifest says %d", info.Size(), f.Size)}
		}
	}
	return &Snapshot{Dir: dir, Manifest: m}, nil
}

// Remove unmakes the snapshot in dir: the manifest first, durably, then the rest. Nothing there is no error.
func Remove(dir string) error { return host.Remove(dir) }

// Remove unmakes the snapshot in dir: the manifest first, durably, then the rest. Nothing there is no error.
func (c Cache) Remove(dir string) error {
	_, err := os.Lstat(filepath.Join(dir, manifestName))
	if errors.Is(err, fs.ErrNotExist) {
		return c.FS.RemoveAll(dir)
	}
	if err == nil {
		err = c.FS.Remove(filepath.Join(dir, manifestName))
	}
	if err == nil {
		err = c.FS.SyncDir(dir)
	}
	if err != nil {
		return fmt.Errorf("remove snapshot %s: %w", filepath.Base(dir), err)
	}
	return c.FS.RemoveAll(dir)
}

// Sweep removes from parent the drafts and half removed snapshots whose names begin with prefix, and returns what it removed.
// It must not run while a draft is in the making.
func Sweep(parent, prefix string) ([]string, error) { return host.Sweep(parent, prefix) }

// Sweep is the package's Sweep.
func (c Cache) Sweep(parent, prefix string) ([]string, error) {
	entries, err := os.ReadDir(parent)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("sweep %s: %w", parent, err)
	}
	var removed []string
	for _, e := range entries {
		if !e.IsDir() || !strings.HasPrefix(e.Name(), prefix) {
			continue
		}
		dir := filepath.Join(parent, e.Name())
		_, err := os.Stat(filepath.Join(dir, manifestName))
		if !strings.HasSuffix(dir, tmpSuffix) && !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := c.FS.RemoveAll(dir); err != nil {
			return removed, fmt.Errorf("sweep %s: %w", parent, err)
		}
		removed = append(removed, e.Name())
	}
	return removed, nil
}
