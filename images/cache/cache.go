// Package cache keeps what is slow to make in directories that are named for what they hold and never change once they
// are there. Several programs share one cache: a directory appears by one rename, and the first to make it wins.
package cache

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	lockName   = ".images.lock"
	tempPrefix = ".images-tmp-"
	lockPoll   = 200 * time.Millisecond
)

// Store is one cache directory. Its methods that write need the lock.
type Store struct{ root string }

// Open makes the directory if need be.
func Open(root string) (*Store, error) {
	abs, err := filepath.Abs(root)
	if err != nil {
		return nil, fmt.Errorf("cache %s: %w", root, err)
	}
	if err := os.MkdirAll(abs, 0o755); err != nil {
		return nil, fmt.Errorf("make the cache: %w", err)
	}
	return &Store{root: abs}, nil
}

// Root is the cache directory.
func (s *Store) Root() string { return s.root }

// Path is where the entry of that name is or would be.
func (s *Store) Path(name string) string { return filepath.Join(s.root, name) }

// Lock waits until no other build works in this cache, then removes what a killed one left behind.
// The lock goes with the process, so that a kill -9 frees it.
func (s *Store) Lock(ctx context.Context) (unlock func(), err error) {
	f, err := os.OpenFile(s.Path(lockName), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, fmt.Errorf("lock the cache: %w", err)
	}
	if err := waitLock(ctx, f); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock the cache: %w", err)
	}
	if err := s.sweep(); err != nil {
		f.Close()
		return nil, err
	}
	return func() { f.Close() }, nil
}

func waitLock(ctx context.Context, f *os.File) error {
	tick := time.NewTicker(lockPoll)
	defer tick.Stop()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

func (s *Store) sweep() error {
	entries, err := os.ReadDir(s.root)
	if err != nil {
		return fmt.Errorf("read the cache: %w", err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), tempPrefix) {
			if err := os.RemoveAll(s.Path(e.Name())); err != nil {
				return fmt.Errorf("remove what a stopped build left: %w", err)
			}
		}
	}
	return nil
}

// Temp makes a scratch directory on the cache's file system. The caller calls remove; after a kill the next Lock does.
func (s *Store) Temp() (dir string, remove func() error, err error) {
	dir, err = os.MkdirTemp(s.root, tempPrefix)
	if err != nil {
		return "", nil, fmt.Errorf("make a scratch directory: %w", err)
	}
	return dir, func() error { return os.RemoveAll(dir) }, nil
}

// Publish fills a directory and gives it its name by one rename. Where the name is taken already, that entry stays and
// what was filled is dropped: entries are named for their content, so the two are worth the same.
func (s *Store) Publish(name string, fill func(dir string) error) (path string, err error) {
	dir, remove, err := s.Temp()
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, remove()) }()
	if err := os.Chmod(dir, 0o755); err != nil {
		return "", fmt.Errorf("make %s: %w", name, err)
	}
	if err := fill(dir); err != nil {
		return "", err
	}
	if err := syncTree(dir); err != nil {
		return "", fmt.Errorf("write %s to disk: %w", name, err)
	}
	err = os.Rename(dir, s.Path(name))
	if errors.Is(err, fs.ErrExist) || errors.Is(err, unix.ENOTEMPTY) {
		return s.Path(name), nil
	}
	if err != nil {
		return "", fmt.Errorf("publish %s: %w", name, err)
	}
	return s.Path(name), SyncDir(s.root)
}

// syncTree makes the regular files directly in dir durable; deeper ones (modules) can be made again.
func syncTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Type().IsRegular() {
			if err := syncFile(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return SyncDir(dir)
}

// SyncDir makes the names in a directory durable.
func SyncDir(dir string) error { return syncFile(dir) }

func syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// Point makes alias name an entry, replacing what it named before.
func (s *Store) Point(alias, name string) error {
	if err := ReplaceSymlink(s.Path(alias), name); err != nil {
		return fmt.Errorf("point %s at %s: %w", alias, name, err)
	}
	return nil
}

// Follow is the name of the entry that alias names; ok is false where there is no alias or its entry has gone.
func (s *Store) Follow(alias string) (name string, ok bool) {
	name, err := os.Readlink(s.Path(alias))
	if err != nil || name != filepath.Base(name) {
		return "", false
	}
	info, err := os.Stat(s.Path(name))
	return name, err == nil && info.IsDir()
}

// ReplaceSymlink makes link point to target, in one step: a reader sees the old link or the new one.
func ReplaceSymlink(link, target string) (err error) {
	dir, err := os.MkdirTemp(filepath.Dir(link), tempPrefix)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	fresh := filepath.Join(dir, "link")
	if err := os.Symlink(target, fresh); err != nil {
		return err
	}
	return os.Rename(fresh, link)
}
