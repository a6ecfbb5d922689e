package base

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// file is one file of a tree.
type file struct {
	rel    string // path below the tree, "." for the tree itself
	mode   uint32 // as in stat(2)
	uid    uint32
	gid    uint32
	mtime  int64
	target string // of a symbolic link
	id     inode
	links  uint64
}

type inode struct{ dev, ino uint64 }

// scan lists a tree, each directory before its content and names sorted.
func scan(tree string) ([]file, error) {
	var files []file
	err := filepath.WalkDir(tree, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(tree, path)
		if err != nil {
			return err
		}
		f, err := stat(path, rel)
		if err != nil {
			return err
		}
		files = append(files, f)
		if rel == "dev" { // the kernel fills it when the guest starts
			return fs.SkipDir
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the new tree: %w", err)
	}
	return files, nil
}

func stat(path, rel string) (file, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return file{}, err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return file{}, fmt.Errorf("%s: no stat", path)
	}
	f := file{
		rel: rel, mode: st.Mode, uid: st.Uid, gid: st.Gid, mtime: st.Mtim.Sec,
		id: inode{st.Dev, st.Ino}, links: st.Nlink,
	}
	if n, err := unix.Llistxattr(path, nil); err == nil && n > 0 {
		return file{}, fmt.Errorf("/%s has extended attributes, which the image would lose", rel)
	}
	if info.Mode()&fs.ModeSymlink != 0 {
		f.target, err = os.Readlink(path)
	}
	return f, err
}

// writeScript writes debugfs commands that make the tree's files in an empty file system.
func writeScript(w *bytes.Buffer, tree string, files []file, started int64) error {
	s := scriptWriter{w: w, tree: tree, started: started, first: map[inode]string{}}
	for _, f := range files {
		if err := s.add(f); err != nil {
			return err
		}
	}
	return nil
}

type scriptWriter struct {
	w       *bytes.Buffer
	tree    string
	started int64
	dir     string // where the script's "cd" has gone
	first   map[inode]string
}

func (s *scriptWriter) add(f file) error {
	for _, text := range []string{f.rel, f.target} {
		if strings.ContainsAny(text, "\"\n\r\x00") {
			return fmt.Errorf("debugfs cannot take the name %q", text)
		}
	}
	path, name := imagePath(f.rel), filepath.Base(f.rel)
	if f.rel == "." {
		s.attributes("/", f)
		return nil
	}
	// "write" and "mknod" only know names in the current directory.
	if dir := filepath.Dir(path); dir != s.dir {
		s.line("cd", quote(dir))
		s.dir = dir
	}
	switch f.mode & unix.S_IFMT {
	case unix.S_IFDIR:
		s.line("mkdir", quote(name))
	case unix.S_IFLNK:
		s.line("symlink", quote(name), quote(f.target))
	case unix.S_IFREG:
		if s.isLink(f, path) {
			return nil
		}
		s.line("write", quote(filepath.Join(s.tree, f.rel)), quote(name))
	default:
		return fmt.Errorf("%s: a file of type %#o does not belong into the image", path, f.mode&unix.S_IFMT)
	}
	s.attributes(name, f)
	return nil
}

// isLink makes f a further name of a file that is there already; debugfs leaves the count of names to us.
func (s *scriptWriter) isLink(f file, path string) bool {
	if f.links < 2 {
		return false
	}
	first, ok := s.first[f.id]
	if !ok {
		s.first[f.id] = path
		return false
	}
	s.line("ln", quote(first), quote(path))
	s.set(first, "links_count", strconv.FormatUint(f.links, 10))
	return true
}

func (s *scriptWriter) attributes(name string, f file) {
	s.set(name, "mode", fmt.Sprintf("0%o", f.mode))
	if f.uid != 0 {
		s.set(name, "uid", strconv.FormatUint(uint64(f.uid), 10))
	}
	if f.gid != 0 {
		s.set(name, "gid", strconv.FormatUint(uint64(f.gid), 10))
	}
	if f.mtime < s.started && f.mode&unix.S_IFMT != unix.S_IFDIR {
		s.set(name, "mtime", fmt.Sprintf("@%d", f.mtime))
	}
}

// set gives a field of an inode its value.
func (s *scriptWriter) set(name, field, value string) { s.line("sif", quote(name), field, value) }

// line adds a command.
func (s *scriptWriter) line(words ...string) { s.w.WriteString(strings.Join(words, " ") + "\n") }

// quote is a name as debugfs takes it; add has refused what would need escaping.
func quote(name string) string { return `"` + name + `"` }
