// Package env holds what a guest knows about the sandbox it is: identity, access token, global environment, defaults,
// and the rules that follow from them (which user, which environment, which path).
//
// The knowledge arrives by handshake from the host, changes as a whole, and is kept in guest memory only: the copy that
// lets a restarted daemon go on lies on a tmpfs, so it is part of a memory snapshot and never of a disk.
package env

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
)

// Version is the envd version this daemon's wire behaviour matches; clients compare it as semver.
const Version = "0.6.13"

// DefaultPath is the PATH of the daemon and of every process it starts.
const DefaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Identity is everything one incarnation of a sandbox is told. It is never changed in place.
type Identity struct {
	Incarnation    uint64            `json:"incarnation"` // 0 before the first handshake
	SandboxID      string            `json:"sandboxID"`
	TemplateID     string            `json:"templateID"`
	AccessToken    string            `json:"accessToken"` // empty: requests are not checked
	EnvVars        map[string]string `json:"envVars"`     // as given at create
	DefaultUser    string            `json:"defaultUser"`
	DefaultWorkdir string            `json:"defaultWorkdir"`
}

// Globals returns the global environment: what the platform provides, then the sandbox's own variables. The map is the
// caller's.
func (id *Identity) Globals() map[string]string {
	vars := map[string]string{"E2B_SANDBOX": "true"}
	if id.SandboxID != "" {
		vars["E2B_SANDBOX_ID"] = id.SandboxID
	}
	if id.TemplateID != "" {
		vars["E2B_TEMPLATE_ID"] = id.TemplateID
	}
	maps.Copy(vars, id.EnvVars)
	return vars
}

// Store holds the current identity. Readers never wait; changes are serialised.
type Store struct {
	users Users
	path  string
	mu    sync.Mutex // held over a change
	cur   atomic.Pointer[Identity]
}

// NewStore returns a store that mirrors the identity to the file at path, which must be on a file system in memory; an
// empty path keeps it in the process only. An identity already there is taken over.
func NewStore(path string, initial Identity, users Users) (*Store, error) {
	s := &Store{users: users, path: path}
	s.cur.Store(&initial)
	if path == "" {
		return s, nil
	}
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the identity of the sandbox: %w", err)
	}
	var id Identity
	if err := json.Unmarshal(raw, &id); err != nil {
		return nil, fmt.Errorf("reading the identity of the sandbox at %s: %w", path, err)
	}
	s.cur.Store(&id)
	return s, nil
}

// Get returns the current identity, which must not be modified.
func (s *Store) Get() *Identity { return s.cur.Load() }

// Update replaces the identity by what change makes of a copy of it. If change fails, or the mirror cannot be written,
// the old identity stays.
func (s *Store) Update(change func(*Identity) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	next := *s.cur.Load()
	if err := change(&next); err != nil {
		return err
	}
	if err := s.mirror(&next); err != nil {
		return err
	}
	s.cur.Store(&next)
	return nil
}

func (s *Store) mirror(id *Identity) error {
	if s.path == "" {
		return nil
	}
	raw, err := json.Marshal(id)
	if err != nil {
		return fmt.Errorf("encoding the identity: %w", err)
	}
	tmp := s.path + ".new"
	if err := os.MkdirAll(filepath.Dir(s.path), 0o700); err != nil {
		return fmt.Errorf("keeping the identity: %w", err)
	}
	if err := os.WriteFile(tmp, raw, 0o600); err != nil {
		return fmt.Errorf("keeping the identity: %w", err)
	}
	if err := os.Rename(tmp, s.path); err != nil {
		return fmt.Errorf("keeping the identity: %w", err)
	}
	return nil
}
