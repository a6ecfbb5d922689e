package filesystem

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/user"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"torpor/api/envd"
	"torpor/api/envd/envdconnect"
	"torpor/guest/env"
)

// me is the only account of the test's guest: who runs the test, at a home of its own.
type me struct{ home string }

func (m me) Lookup(name string) (env.User, error) {
	if name != "tester" {
		return env.User{}, &env.UnknownUserError{Name: name}
	}
	return env.User{Name: name, UID: uint32(os.Getuid()), GID: uint32(os.Getgid()), Home: m.home}, nil
}

func newClient(t *testing.T) (envdconnect.FilesystemClient, string) {
	t.Helper()
	home := t.TempDir()
	store, err := env.NewStore("", env.Identity{DefaultUser: "tester"}, me{home})
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle(envdconnect.NewFilesystemHandler(New(store)))
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return envdconnect.NewFilesystemClient(server.Client(), server.URL, connect.WithProtoJSON()), home
}

// plant makes the named files below dir, and directories for names that end in a slash.
func plant(t *testing.T, dir string, names ...string) {
	t.Helper()
	for _, name := range names {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if strings.HasSuffix(name, "/") {
			err = os.MkdirAll(path, 0o755)
		} else {
			err = os.WriteFile(path, []byte(name), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func stat(c envdconnect.FilesystemClient, path string) (*envd.EntryInfo, error) {
	resp, err := c.Stat(context.Background(), connect.NewRequest(&envd.StatRequest{Path: path}))
	if err != nil {
		return nil, err
	}
	return resp.Msg.GetEntry(), nil
}

func TestStat(t *testing.T) {
	c, home := newClient(t)
	plant(t, home, "f.txt", "d/")
	who, err := user.Current()
	if err != nil {
		t.Fatal(err)
	}
	e, err := stat(c, "f.txt")
	if err != nil {
		t.Fatal(err)
	}
	if e.GetName() != "f.txt" || e.GetPath() != home+"/f.txt" || e.GetType() != envd.FileType_FILE_TYPE_FILE || e.GetSize() != 5 ||
		e.GetMode() != 0o644 || e.GetPermissions() != "-rw-r--r--" || e.GetOwner() != who.Username || e.GetGroup() == "" ||
		e.GetModifiedTime().AsTime().IsZero() || e.SymlinkTarget != nil {
		t.Errorf("file %v", e)
	}
	if e, err = stat(c, "d"); err != nil || e.GetType() != envd.FileType_FILE_TYPE_DIRECTORY || e.GetPermissions() != "drwxr-xr-x" {
		t.Errorf("directory %v, %v", e, err)
	}
	if _, err = stat(c, "nope"); connect.CodeOf(err) != connect.CodeNotFound || !strings.Contains(err.Error(), "file not found") {
		t.Errorf("missing: %v", err)
	}
	if _, err = stat(c, "f.txt/below"); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("below a file: %v", err)
	}
	if _, err = stat(c, "a\x00b"); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("NUL: %v", err)
	}
}

func TestStatFollowsLinks(t *testing.T) {
	c, home := newClient(t)
	plant(t, home, "dir/target")
	for name, to := range map[string]string{"rel": "dir/target", "chain": "rel", "dirlink": "dir", "broken": "nothing", "loop": "loop"} {
		if err := os.Symlink(to, filepath.Join(home, name)); err != nil {
			t.Fatal(err)
		}
	}
	for _, test := range []struct {
		name, target string
		kind         envd.FileType
	}{
		{"rel", "dir/target", envd.FileType_FILE_TYPE_FILE},
		{"chain", "dir/target", envd.FileType_FILE_TYPE_FILE},
		{"dirlink", "dir", envd.FileType_FILE_TYPE_DIRECTORY},
		{"broken", "nothing", envd.FileType_FILE_TYPE_UNSPECIFIED},
		{"loop", "loop", envd.FileType_FILE_TYPE_UNSPECIFIED},
	} {
		e, err := stat(c, test.name)
		if err != nil || e.GetType() != test.kind || e.GetSymlinkTarget() != filepath.Join(home, test.target) || e.GetPermissions()[0] != 'L' {
			t.Errorf("%s: %v, %v", test.name, e, err)
		}
	}
	if e, _ := stat(c, "chain"); e.GetSize() != int64(len("dir/target")) || e.GetMode() != 0o644 {
		t.Errorf("size and mode are not the target's: %v", e)
	}
}

func TestMakeDir(t *testing.T) {
	c, home := newClient(t)
	plant(t, home, "file")
	make := func(path string) error {
		_, err := c.MakeDir(t.Context(), connect.NewRequest(&envd.MakeDirRequest{Path: path}))
		return err
	}
	if err := make("a/b/c"); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]connect.Code{
		"a/b/c": connect.CodeAlreadyExists, "a": connect.CodeAlreadyExists, "file": connect.CodeInvalidArgument,
		"file/x/y": connect.CodeInvalidArgument, "": connect.CodeInvalidArgument, "~x/y": connect.CodeInvalidArgument,
	} {
		if err := make(path); connect.CodeOf(err) != want {
			t.Errorf("%q: %v, want %v", path, err, want)
		}
	}
	if info, err := os.Stat(home + "/a/b"); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("parent %v, %v", info, err)
	}
}

func TestMove(t *testing.T) {
	c, home := newClient(t)
	plant(t, home, "from", "other")
	move := func(from, to string) (*envd.EntryInfo, error) {
		resp, err := c.Move(t.Context(), connect.NewRequest(&envd.MoveRequest{Source: from, Destination: to}))
		if err != nil {
			return nil, err
		}
		return resp.Msg.GetEntry(), nil
	}
	e, err := move("from", "new/place/to")
	if err != nil || e.GetPath() != home+"/new/place/to" || e.GetName() != "to" {
		t.Fatalf("%v, %v", e, err)
	}
	if _, err := move("from", "x"); connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("missing source: %v", err)
	}
	if _, err := os.Stat(home + "/from"); err == nil {
		t.Error("the source is still there")
	}
	if _, err := move("other", "new/place/to/below"); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("below a file: %v", err)
	}
	if _, err := move("other", ""); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("no destination: %v", err)
	}
}

func TestRemove(t *testing.T) {
	c, home := newClient(t)
	plant(t, home, "d/e/f", "file")
	for _, path := range []string{"d", "d", "file/below", "never"} {
		if _, err := c.Remove(t.Context(), connect.NewRequest(&envd.RemoveRequest{Path: path})); err != nil {
			t.Errorf("%q: %v", path, err)
		}
	}
	if _, err := c.Remove(t.Context(), connect.NewRequest(&envd.RemoveRequest{})); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("an empty path, which would be the home: %v", err)
	}
	left, err := os.ReadDir(home)
	if err != nil || len(left) != 1 || left[0].Name() != "file" {
		t.Errorf("left %v, %v", left, err)
	}
}

func TestListDir(t *testing.T) {
	c, home := newClient(t)
	plant(t, home, "p/a/x/deep", "p/a/y", "p/b", "p/a.txt")
	for _, link := range [][2]string{{"a", "p/link"}, {"p", "root"}, {"loop", "loop"}} {
		if err := os.Symlink(link[0], filepath.Join(home, link[1])); err != nil {
			t.Fatal(err)
		}
	}
	list := func(path string, depth uint32) (string, error) {
		resp, err := c.ListDir(t.Context(), connect.NewRequest(&envd.ListDirRequest{Path: path, Depth: depth}))
		if err != nil {
			return "", err
		}
		var names []string
		for _, e := range resp.Msg.GetEntries() {
			names = append(names, strings.TrimPrefix(e.GetPath(), home+"/"))
		}
		return strings.Join(names, " "), nil
	}
	for _, test := range []struct {
		path  string
		depth uint32
		want  string
	}{
		{"p", 0, "p/a p/a.txt p/b p/link"},
		{"p", 1, "p/a p/a.txt p/b p/link"},
		{"p", 2, "p/a p/a/x p/a/y p/a.txt p/b p/link"},
		{"p", 9, "p/a p/a/x p/a/x/deep p/a/y p/a.txt p/b p/link"},
		{"root", 1, "root/a root/a.txt root/b root/link"},
		{"p/a/x/", 1, "p/a/x/deep"},
	} {
		if got, err := list(test.path, test.depth); got != test.want || err != nil {
			t.Errorf("%s to %d: %q, %v", test.path, test.depth, got, err)
		}
	}
	for path, want := range map[string]connect.Code{
		"nope": connect.CodeNotFound, "p/b": connect.CodeInvalidArgument, "loop": connect.CodeFailedPrecondition,
	} {
		if _, err := list(path, 1); connect.CodeOf(err) != want {
			t.Errorf("%s: %v, want %v", path, err, want)
		}
	}
}

func TestMetadata(t *testing.T) {
	c, home := newClient(t)
	plant(t, home, "f")
	path := home + "/f"
	if err := unix.Setxattr(path, "user.other", []byte("x"), 0); err != nil {
		t.Skipf("no extended attributes here: %v", err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	check := func(want map[string]string) {
		t.Helper()
		e, err := stat(c, "f")
		if err != nil || fmt.Sprint(e.GetMetadata()) != fmt.Sprint(want) {
			t.Errorf("metadata %v, %v, want %v", e.GetMetadata(), err, want)
		}
	}
	check(map[string]string{})
	for _, meta := range []map[string]string{{"Kind": "a", "n": "1"}, {"n": ""}, nil} {
		if err := SetMetadata(int(f.Fd()), path, meta); err != nil {
			t.Fatal(err)
		}
		want := map[string]string{}
		for k, v := range meta {
			want[strings.ToLower(k)] = v
		}
		check(want)
	}
	if err := unix.Setxattr(path, "user.e2b.inside", []byte("guest"), 0); err != nil {
		t.Fatal(err)
	}
	check(map[string]string{"inside": "guest"})
	if n, err := unix.Getxattr(path, "user.other", make([]byte, 9)); err != nil || n != 1 {
		t.Errorf("a foreign attribute was touched: %v", err)
	}
}

func TestUnknownUser(t *testing.T) {
	c, _ := newClient(t)
	req := connect.NewRequest(&envd.StatRequest{Path: "/"})
	req.Header().Set("Authorization", "Basic Ym9iOg==")
	if _, err := c.Stat(t.Context(), req); connect.CodeOf(err) != connect.CodeUnauthenticated {
		t.Errorf("unknown user: %v", err)
	}
}
