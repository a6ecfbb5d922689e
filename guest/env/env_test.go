package env

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"
)

type accounts map[string]User

func (a accounts) Lookup(name string) (User, error) {
	u, ok := a[name]
	if !ok {
		return User{}, &UnknownUserError{Name: name}
	}
	return u, nil
}

func newStore(t *testing.T, path string, id Identity) *Store {
	t.Helper()
	s, err := NewStore(path, id, accounts{"ann": {Name: "ann", Home: "/home/ann"}})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestIdentitySurvivesRestart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run", "identity.json")
	s := newStore(t, path, Identity{DefaultUser: "user"})
	if s.Get().DefaultUser != "user" {
		t.Error("the initial identity was not taken")
	}
	err := s.Update(func(id *Identity) error {
		id.Incarnation, id.AccessToken, id.EnvVars = 3, "secret", map[string]string{"A": "b"}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the mirror is %v, %v; others must not read the token", info, err)
	}
	again := newStore(t, path, Identity{}).Get()
	if again.Incarnation != 3 || again.AccessToken != "secret" || again.EnvVars["A"] != "b" || again.DefaultUser != "user" {
		t.Errorf("after a restart: %+v", again)
	}
	broken := errors.New("broken")
	err = s.Update(func(id *Identity) error { id.Incarnation = 9; return broken })
	if !errors.Is(err, broken) || s.Get().Incarnation != 3 {
		t.Errorf("a failed change left incarnation %d, %v", s.Get().Incarnation, err)
	}
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := NewStore(path, Identity{}, accounts{}); err == nil {
		t.Error("a damaged mirror was taken for no mirror")
	}
}

func TestUser(t *testing.T) {
	s := newStore(t, "", Identity{})
	if _, err := s.User(""); !errors.Is(err, ErrNoUser) {
		t.Errorf("no user at all: %v", err)
	}
	_, err := s.User("bob")
	if code, ok := UserErrorCode(err); !ok || code != connect.CodeUnauthenticated || err.Error() != "invalid username: 'bob'" {
		t.Errorf("unknown user: %v, %v", code, err)
	}
	if u, err := newStore(t, "", Identity{DefaultUser: "ann"}).User(""); err != nil || u.Name != "ann" {
		t.Errorf("default user: %v, %v", u, err)
	}
	if _, ok := UserErrorCode(errors.New("other")); ok {
		t.Error("any error has a code")
	}
}

func TestRequestUser(t *testing.T) {
	for header, want := range map[string]string{
		"": "", "Basic dXNlcjo=": "user", "basic dXNlcjo=": "user", "Basic dXNlcjpwdw==": "user", "Basic !": "", "Bearer dXNlcjo=": "", "Basic Og==": "",
	} {
		if got := RequestUser(http.Header{"Authorization": {header}}); got != want {
			t.Errorf("%q: %q", header, got)
		}
	}
}

func TestSystemUsers(t *testing.T) {
	u, err := SystemUsers{}.Lookup("root")
	if err != nil || u.UID != 0 || u.GID != 0 || u.Home == "" || len(u.Groups) == 0 {
		t.Errorf("root is %+v, %v", u, err)
	}
	var unknown *UnknownUserError
	if _, err := (SystemUsers{}).Lookup("no-such-user-here"); !errors.As(err, &unknown) {
		t.Errorf("unknown user: %v", err)
	}
}

func TestEnvironLayers(t *testing.T) {
	s := newStore(t, "", Identity{SandboxID: "i1", TemplateID: "base", EnvVars: map[string]string{"HOME": "/global", "X": "global"}})
	got := fmt.Sprint(s.Environ(User{Name: "ann", Home: "/home/ann"}, map[string]string{"X": "request"}))
	want := fmt.Sprint(map[string]string{
		"PATH": DefaultPath, "HOME": "/global", "USER": "ann", "LOGNAME": "ann", "X": "request",
		"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": "i1", "E2B_TEMPLATE_ID": "base",
	})
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestResolve(t *testing.T) {
	ann := User{Home: "/home/ann"}
	for _, test := range []struct{ workdir, path, want, fault string }{
		{"", "", "/home/ann", ""},
		{"/app", "", "/app", ""},
		{"app", "", "/home/ann/app", ""},
		{"/app", "x", "/home/ann/x", ""},
		{"", "~", "/home/ann", ""},
		{"", "~/a/../b", "/home/ann/b", ""},
		{"", "~bob", "", "another user"},
		{"", "/a//b/./c/..", "/a/b", ""},
		{"", "../..", "/", ""},
		{"", "../../../..", "/", ""},
		{"", "a\x00b", "", "NUL"},
		{"", strings.Repeat("a", maxPath+1), "", "bytes"},
		{"", "ä b", "/home/ann/ä b", ""},
	} {
		got, err := newStore(t, "", Identity{DefaultWorkdir: test.workdir}).Resolve(ann, test.path)
		if got != test.want || (err != nil) != (test.fault != "") || err != nil && !strings.Contains(err.Error(), test.fault) {
			t.Errorf("%+v: %q, %v", test, got, err)
		}
	}
}

func FuzzResolve(f *testing.F) {
	for _, seed := range []string{"", "~", "~/x", "~x", "/", "a/b", "..", "\x00", "//", "~/../.."} {
		f.Add("/home/ann", seed)
	}
	f.Add("", "x")
	f.Add("rel", "~")
	f.Fuzz(func(t *testing.T, home, path string) {
		got, err := resolve(home, path)
		if err != nil {
			return
		}
		if !filepath.IsAbs(got) || filepath.Clean(got) != got {
			t.Errorf("%q in %q: %q is not absolute and clean", path, home, got)
		}
	})
}
