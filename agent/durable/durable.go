// Package durable is the few operations on files by which snapshots and disk layers are published and removed. Their order is what
// keeps a crash from tearing anything, so they go through one interface: tests stop a program before any one of them, and
// take back what was not synced, as a power cut does.
package durable

import (
	"errors"
	"os"
	"time"
)

// FS is what is done to files. An operation on a directory entry (Mkdir, Rename, Link, Remove, RemoveAll, and the making of a
// file) is durable after SyncDir of the directory it is in; a file's contents are after Sync of the file.
type FS interface {
	// Mkdir makes a directory and those above it; one that exists is no error.
	Mkdir(dir string) error
	Rename(from, to string) error
	// Link gives the file from a second name.
	Link(from, to string) error
	// Write makes a file, which must not exist, with contents that are durable.
	Write(path string, data []byte) error
	// Sync makes a file's contents durable.
	Sync(path string) error
	SyncDir(dir string) error
	// Remove removes a file, and RemoveAll a tree; one that does not exist is no error.
	Remove(path string) error
	RemoveAll(path string) error
	// Stamp sets a file's time of modification.
	Stamp(path string, t time.Time) error
}

// OS is the operating system's FS.
type OS struct{}

// Mkdir implements FS.
func (OS) Mkdir(dir string) error { return os.MkdirAll(dir, 0o700) }

// Rename implements FS.
func (OS) Rename(from, to string) error { return os.Rename(from, to) }

// Link implements FS.
func (OS) Link(from, to string) error { return os.Link(from, to) }

// Write implements FS.
func (OS) Write(path string, data []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, werr := f.Write(data)
	return errors.Join(werr, f.Sync(), f.Close())
}

// Sync implements FS.
func (OS) Sync(path string) error { return syncPath(path) }

// SyncDir implements FS.
func (OS) SyncDir(dir string) error { return syncPath(dir) }

func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// Remove implements FS.
func (OS) Remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// RemoveAll implements FS.
func (OS) RemoveAll(path string) error { return os.RemoveAll(path) }

// Stamp implements FS. The time of access is left as it is.
func (OS) Stamp(path string, t time.Time) error { return os.Chtimes(path, time.Time{}, t) }
