// Package powercut is a durable.FS for tests: it tells before every operation, so that a test can end the program there, and it
// can take back what was not synced, as a cut of the power does.
//
// The model is the strictest that POSIX allows for directory entries: every one that was made, moved or removed and whose
// directory was not synced since is as it was before. That contents are as good as their last sync is up to who writes them.
package powercut

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"torpor/agent/durable"
)

// FS works on the real file system. It is safe for concurrent use.
type FS struct {
	before func(point string) error
	trash  string

	mu      sync.Mutex
	pending []change // not durable yet, oldest first; guarded by mu
	removed int      // numbers what is in the trash; guarded by mu
}

// change is one change of a directory entry.
type change struct {
	dir  string // its sync makes it durable
	name string // of the entry that was removed
	from string // where the entry was, or is kept; empty if there was none
	to   string // where it is; empty if it is removed
}

// New returns an FS that calls before with the name of each operation before it is done; an error is the operation's. What is
// removed is kept in the directory trash, which must be on the same file system, for as long as its removal is not durable.
func New(trash string, before func(point string) error) *FS {
	return &FS{before: before, trash: trash}
}

func (f *FS) run(op, path string, do func() error) error {
	point := op + " " + filepath.Base(path)
	if err := f.before(point); err != nil {
		return &os.PathError{Op: op, Path: path, Err: err}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return do()
}

// Made tells that somebody else has made the file at path.
func (f *FS) Made(path string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.note(change{dir: filepath.Dir(path), to: path})
}

func (f *FS) note(c change) { f.pending = append(f.pending, c) }

// Mkdir implements durable.FS.
func (f *FS) Mkdir(dir string) error {
	return f.run("mkdir", dir, func() error {
		var made []string
		for d := dir; ; d = filepath.Dir(d) {
			if _, err := os.Stat(d); err == nil || d == filepath.Dir(d) {
				break
			}
			made = append(made, d)
		}
		if err := (durable.OS{}).Mkdir(dir); err != nil {
			return err
		}
		for i := len(made) - 1; i >= 0; i-- {
			f.note(change{dir: filepath.Dir(made[i]), to: made[i]})
		}
		return nil
	})
}

// Rename implements durable.FS. Both names must be in one directory.
func (f *FS) Rename(from, to string) error {
	return f.run("rename", to, func() error {
		if filepath.Dir(from) != filepath.Dir(to) {
			return fmt.Errorf("rename %s to another directory: %s", from, to)
		}
		if err := os.Rename(from, to); err != nil {
			return err
		}
		f.moved(from, to)
		f.note(change{dir: filepath.Dir(to), from: from, to: to})
		return nil
	})
}

// moved has pending changes below a directory follow it.
func (f *FS) moved(from, to string) {
	follow := func(p *string) {
		if rest, below := strings.CutPrefix(*p, from+"/"); below {
			*p = filepath.Join(to, rest)
		} else if *p == from {
			*p = to
		}
	}
	for i := range f.pending {
		c := &f.pending[i]
		if c.dir == from || strings.HasPrefix(c.dir, from+"/") {
			follow(&c.dir)
			follow(&c.from)
			follow(&c.to)
		}
	}
}

// Link implements durable.FS.
func (f *FS) Link(from, to string) error {
	return f.run("link", to, func() error {
		if err := os.Link(from, to); err != nil {
			return err
		}
		f.note(change{dir: filepath.Dir(to), to: to})
		return nil
	})
}

// Write implements durable.FS.
func (f *FS) Write(path string, data []byte) error {
	return f.run("write", path, func() error {
		if err := (durable.OS{}).Write(path, data); err != nil {
			return err
		}
		f.note(change{dir: filepath.Dir(path), to: path})
		return nil
	})
}

// Sync implements durable.FS.
func (f *FS) Sync(path string) error {
	return f.run("sync", path, func() error { return (durable.OS{}).Sync(path) })
}

// SyncDir implements durable.FS.
func (f *FS) SyncDir(dir string) error {
	return f.run("syncdir", dir, func() error {
		if err := (durable.OS{}).SyncDir(dir); err != nil {
			return err
		}
		kept := f.pending[:0]
		for _, c := range f.pending {
			if c.dir != dir {
				kept = append(kept, c)
			}
		}
		f.pending = kept
		return nil
	})
}

// Remove implements durable.FS.
func (f *FS) Remove(path string) error {
	return f.run("remove", path, func() error { return f.toTrash(path) })
}

// RemoveAll implements durable.FS.
func (f *FS) RemoveAll(path string) error {
	return f.run("removeall", path, func() error { return f.toTrash(path) })
}

func (f *FS) toTrash(path string) error {
	if _, err := os.Lstat(path); err != nil {
		return nil
	}
	f.removed++
	kept := filepath.Join(f.trash, fmt.Sprint(f.removed))
	if err := os.Rename(path, kept); err != nil {
		return err
	}
	f.moved(path, kept)
	f.note(change{dir: filepath.Dir(path), name: filepath.Base(path), from: kept})
	return nil
}

// Stamp implements durable.FS.
func (f *FS) Stamp(path string, t time.Time) error {
	return f.run("stamp", path, func() error { return (durable.OS{}).Stamp(path, t) })
}

// Cut takes back, newest first, every change that was not made durable. The program must have ended.
func (f *FS) Cut() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := len(f.pending) - 1; i >= 0; i-- {
		c := f.pending[i]
		if err := undo(c); err != nil {
			return fmt.Errorf("take back %+v: %w", c, err)
		}
		switch {
		case c.from != "" && c.to != "":
			f.movedBefore(i, c.to, c.from)
		case c.from != "":
			f.movedBefore(i, c.from, filepath.Join(c.dir, c.name))
		}
	}
	f.pending = nil
	return nil
}

// movedBefore is moved for the changes before the one that is taken back.
func (f *FS) movedBefore(n int, from, to string) {
	all := f.pending
	f.pending = all[:n]
	f.moved(from, to)
	f.pending = all
}

func undo(c change) error {
	switch {
	case c.from == "":
		return os.RemoveAll(c.to)
	case c.to == "":
		return putBack(c.from, c)
	default:
		return os.Rename(c.to, c.from)
	}
}

// putBack returns what was removed to its place, unless its directory is gone as well.
func putBack(kept string, c change) error {
	if _, err := os.Stat(c.dir); err != nil {
		return nil
	}
	return os.Rename(kept, filepath.Join(c.dir, c.name))
}
