package filesystem

import (
	"bytes"
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// xattrPrefix is where the metadata of a file lies: one extended attribute per key.
const xattrPrefix = "user.e2b."

// Limits of the metadata of one file, in bytes; the kernel's limit of an attribute name is 255.
const (
	MaxMetadataKey   = 246
	MaxMetadataTotal = 4096
)

// Metadata returns the metadata of the file at path, not following a link; nil if there is none or the file system
// cannot hold any.
func Metadata(path string) map[string]string {
	var meta map[string]string
	for _, name := range listXattrs(path) {
		key, ours := strings.CutPrefix(name, xattrPrefix)
		if !ours {
			continue
		}
		value, err := getXattr(path, name)
		if err != nil {
			continue // removed just now
		}
		if meta == nil {
			meta = map[string]string{}
		}
		meta[key] = value
	}
	return meta
}

// listXattrs returns the names of all extended attributes; none if they cannot be read.
func listXattrs(path string) []string {
	size, err := unix.Llistxattr(path, nil)
	for err == nil && size > 0 {
		buf := make([]byte, size)
		n, readErr := unix.Llistxattr(path, buf)
		if errors.Is(readErr, unix.ERANGE) { // grew between the calls
			size, err = unix.Llistxattr(path, nil)
			continue
		}
		if readErr != nil {
			return nil
		}
		var names []string
		for _, name := range bytes.Split(buf[:n], []byte{0}) {
			if len(name) > 0 {
				names = append(names, string(name))
			}
		}
		return names
	}
	return nil
}

func getXattr(path, name string) (string, error) {
	buf := make([]byte, MaxMetadataTotal)
	n, err := unix.Lgetxattr(path, name, buf)
	if errors.Is(err, unix.ERANGE) { // set inside the guest, longer than we would
		buf = make([]byte, 1<<16)
		n, err = unix.Lgetxattr(path, name, buf)
	}
	if err != nil {
		return "", err
	}
	return string(buf[:n]), nil
}

// SetMetadata replaces the whole metadata of an open file. Keys are stored in lower case.
func SetMetadata(fd int, path string, meta map[string]string) error {
	for _, name := range listXattrs(path) {
		key, ours := strings.CutPrefix(name, xattrPrefix)
		if _, kept := meta[key]; !ours || kept {
			continue
		}
		if err := unix.Fremovexattr(fd, name); err != nil && !errors.Is(err, unix.ENODATA) {
			return fmt.Errorf("removing metadata %q: %w", key, err)
		}
	}
	for key, value := range meta {
		if err := unix.Fsetxattr(fd, xattrPrefix+strings.ToLower(key), []byte(value), 0); err != nil {
			return fmt.Errorf("setting metadata %q: %w", key, err)
		}
	}
	return nil
}
