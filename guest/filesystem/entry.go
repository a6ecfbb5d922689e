package filesystem

import (
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"torpor/api/envd"
)

// describer builds entries and remembers the account names of one request.
type describer struct {
	users, groups map[uint32]string
}

func newDescriber() *describer {
	return &describer{users: map[uint32]string{}, groups: map[uint32]string{}}
}

// entry describes what is at path, shown to the client under the name shown. A link is described as what it leads to,
// but for its permissions, owner and time; a broken one has an unspecified type.
func (d *describer) entry(path, shown string) (*envd.EntryInfo, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	e := &envd.EntryInfo{
		Name: filepath.Base(shown), Path: shown,
		Type: fileType(info.Mode()), Size: info.Size(), Mode: uint32(info.Mode().Perm()),
		Permissions:  info.Mode().String(),
		ModifiedTime: timestamppb.New(info.ModTime()),
		Metadata:     Metadata(path),
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		e.Owner, e.Group = d.owner(st.Uid), d.group(st.Gid)
	}
	if info.Mode()&fs.ModeSymlink != 0 {
		follow(path, e)
	}
	return e, nil
}

func follow(path string, e *envd.EntryInfo) {
	e.Type = envd.FileType_FILE_TYPE_UNSPECIFIED
	target, err := filepath.EvalSymlinks(path)
	if err != nil { // broken: say at least where it points
		if target, err = os.Readlink(path); err != nil {
			return
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(filepath.Dir(path), target)
		}
		e.SymlinkTarget = proto.String(target)
		return
	}
	e.SymlinkTarget = proto.String(target)
	if info, err := os.Stat(target); err == nil {
		e.Type, e.Size, e.Mode = fileType(info.Mode()), info.Size(), uint32(info.Mode().Perm())
		e.Metadata = Metadata(target)
	}
}

// fileType: the protocol knows files, directories and links; devices, sockets and pipes are unspecified.
func fileType(m fs.FileMode) envd.FileType {
	switch {
	case m.IsRegular():
		return envd.FileType_FILE_TYPE_FILE
	case m.IsDir():
		return envd.FileType_FILE_TYPE_DIRECTORY
	}
	return envd.FileType_FILE_TYPE_UNSPECIFIED
}

func (d *describer) owner(id uint32) string {
	return cached(d.users, id, func(s string) (string, error) {
		u, err := user.LookupId(s)
		if err != nil {
			return "", err
		}
		return u.Username, nil
	})
}

func (d *describer) group(id uint32) string {
	return cached(d.groups, id, func(s string) (string, error) {
		g, err := user.LookupGroupId(s)
		if err != nil {
			return "", err
		}
		return g.Name, nil
	})
}

// cached answers the name of an id, or the id itself if it has none.
func cached(names map[uint32]string, id uint32, look func(string) (string, error)) string {
	if name, ok := names[id]; ok {
		return name
	}
	number := strconv.FormatUint(uint64(id), 10)
	name, err := look(number)
	if err != nil {
		name = number
	}
	names[id] = name
	return name
}

// MakeDirs makes the directory at path and its missing parents, mode 0755, each owned by uid and gid. It is no error if
// path is a directory already.
func MakeDirs(path string, uid, gid int) error {
	info, err := os.Stat(path)
	if err == nil {
		if !info.IsDir() {
			return fmt.Errorf("'%s' is not a directory: %w", path, syscall.ENOTDIR)
		}
		return nil
	}
	if parent := filepath.Dir(path); parent != path {
		if err := MakeDirs(parent, uid, gid); err != nil {
			return err
		}
	}
	if err := os.Mkdir(path, 0o755); err != nil {
		if info, statErr := os.Stat(path); statErr == nil && info.IsDir() {
			return nil // somebody else made it just now
		}
		return fmt.Errorf("making directory '%s': %w", path, err)
	}
	if err := os.Chown(path, uid, gid); err != nil {
		return fmt.Errorf("giving directory '%s' to its user: %w", path, err)
	}
	return nil
}
