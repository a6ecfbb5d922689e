package env

import (
	"errors"
	"fmt"
	"net/http"
	"os/user"
	"slices"
	"strconv"

	"connectrpc.com/connect"
)

// User is an account of the guest.
type User struct {
	Name     string
	UID, GID uint32
	Groups   []uint32 // supplementary groups, the primary one included
	Home     string
}

// ErrNoUser says that a request named no user and the sandbox has no default one.
var ErrNoUser = errors.New("no user given and the sandbox has no default user")

// UnknownUserError says that the guest has no account of that name.
type UnknownUserError struct{ Name string }

func (e *UnknownUserError) Error() string { return fmt.Sprintf("invalid username: '%s'", e.Name) }

// Users finds accounts. Lookup answers *UnknownUserError for a name that does not exist.
type Users interface {
	Lookup(name string) (User, error)
}

// SystemUsers reads /etc/passwd and /etc/group anew on every look-up: users may be added while the sandbox runs.
type SystemUsers struct{}

// Lookup finds an account by name.
func (SystemUsers) Lookup(name string) (User, error) {
	u, err := user.Lookup(name)
	var unknown user.UnknownUserError
	if errors.As(err, &unknown) {
		return User{}, &UnknownUserError{Name: name}
	}
	if err != nil {
		return User{}, fmt.Errorf("looking up user %q: %w", name, err)
	}
	found := User{Name: u.Username, Home: u.HomeDir}
	if found.UID, err = parseID(u.Uid); err != nil {
		return User{}, err
	}
	if found.GID, err = parseID(u.Gid); err != nil {
		return User{}, err
	}
	ids, err := u.GroupIds()
	if err != nil {
		return User{}, fmt.Errorf("looking up the groups of user %q: %w", name, err)
	}
	for _, id := range ids {
		gid, err := parseID(id)
		if err != nil {
			return User{}, err
		}
		if !slices.Contains(found.Groups, gid) {
			found.Groups = append(found.Groups, gid)
		}
	}
	return found, nil
}

func parseID(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("account id %q: %w", s, err)
	}
	return uint32(n), nil
}

// User finds the account a request acts as: the named one, else the sandbox's default. ErrNoUser if there is neither.
func (s *Store) User(name string) (User, error) {
	if name == "" {
		name = s.Get().DefaultUser
	}
	if name == "" {
		return User{}, ErrNoUser
	}
	return s.users.Lookup(name)
}

// Environ builds the environment of a process of user u: PATH and the user's own variables, then the global ones, then
// those of the request, later ones winning. The daemon's own environment is never part of it.
func (s *Store) Environ(u User, request map[string]string) map[string]string {
	vars := map[string]string{"PATH": DefaultPath, "HOME": u.Home, "USER": u.Name, "LOGNAME": u.Name}
	for _, layer := range []map[string]string{s.Get().Globals(), request} {
		for k, v := range layer {
			vars[k] = v
		}
	}
	return vars
}

// RequestUser returns the user name of an RPC request's Basic authorization; "" if it has none. There is no password:
// the access token was checked before.
func RequestUser(h http.Header) string {
	name, _, _ := (&http.Request{Header: h}).BasicAuth()
	return name
}

// UserErrorCode returns the Connect code of an error of Store.User, or false for another error.
func UserErrorCode(err error) (connect.Code, bool) {
	var unknown *UnknownUserError
	switch {
	case errors.As(err, &unknown):
		return connect.CodeUnauthenticated, true
	case errors.Is(err, ErrNoUser):
		return connect.CodeInvalidArgument, true
	}
	return 0, false
}
