package env

import (
	"fmt"
	"path/filepath"
	"strings"
)

// maxPath is the kernel's PATH_MAX, without the final NUL.
const maxPath = 4095

// PathError says why a path given by a client cannot be used.
type PathError struct{ Path, Reason string }

func (e *PathError) Error() string { return fmt.Sprintf("path '%s' %s", e.Path, e.Reason) }

// Resolve makes a client's path absolute and clean: "~" and "~/x" are the user's home, a relative path is joined to the
// home, and an empty one is the default workdir, else the home.
func (s *Store) Resolve(u User, path string) (string, error) {
	if path == "" {
		path = s.Get().DefaultWorkdir
	}
	return resolve(u.Home, path)
}

func resolve(home, path string) (string, error) {
	switch {
	case len(path) > maxPath:
		return "", &PathError{Path: path[:32] + "…", Reason: fmt.Sprintf("has more than %d bytes", maxPath)}
	case strings.ContainsRune(path, 0):
		return "", &PathError{Path: strings.ReplaceAll(path, "\x00", `\0`), Reason: "contains a NUL byte"}
	case path == "" || path == "~":
		path = home
	case strings.HasPrefix(path, "~/"):
		path = filepath.Join(home, path[2:])
	case strings.HasPrefix(path, "~"):
		return "", &PathError{Path: path, Reason: "names the home of another user, which is not supported"}
	case !filepath.IsAbs(path):
		path = filepath.Join(home, path)
	}
	if !filepath.IsAbs(path) { // a home that is not absolute
		path = "/" + path
	}
	return filepath.Clean(path), nil
}
