// Package auth decides who may call the control plane. One key is made at the first start and written to a file that only
// the owner can read; the database keeps hashes only. Keys appear in no log.
package auth

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"torpor/api/id"
	"torpor/controlplane/store"
)

// KeyFile is the name of the key file in the data directory.
const KeyFile = "api-key"

var keyForm = regexp.MustCompile(`^e2b_[0-9a-f]{40}$`)

// Keys checks API keys. It is immutable and safe for concurrent use.
type Keys struct {
	hashes []store.KeyHash
}

// Load returns the keys of the store, after making sure that the key in dir's key file is one of them. A missing file is
// made with a new key; a file whose key the database does not know (the database was lost) is believed.
func Load(ctx context.Context, dir string, s *store.Store) (*Keys, error) {
	path := filepath.Join(dir, KeyFile)
	key, err := readKey(path)
	if errors.Is(err, fs.ErrNotExist) {
		key = id.NewAPIKey()
		err = writeKey(path, key)
	}
	if err != nil {
		return nil, err
	}
	if err := s.AddKey(ctx, store.HashKey(key), "first key", time.Now()); err != nil {
		return nil, err
	}
	hashes, err := s.Keys(ctx)
	if err != nil {
		return nil, err
	}
	return &Keys{hashes: hashes}, nil
}

// Valid reports whether key is one of the keys. Its time does not depend on which, nor on how much of a key is right.
func (k *Keys) Valid(key string) bool {
	hash := store.HashKey(key)
	valid := 0
	for i := range k.hashes {
		valid |= subtle.ConstantTimeCompare(hash[:], k.hashes[i][:])
	}
	return valid == 1
}

func readKey(path string) (string, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("read the API key: %w", err)
	}
	key := strings.TrimSpace(string(raw))
	if !keyForm.MatchString(key) {
		return "", fmt.Errorf("%s holds no API key of the form e2b_ and 40 hex digits: restore it, or remove it to get a new key", path)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return "", fmt.Errorf("keep the API key private: %w", err)
	}
	return key, nil
}

// writeKey publishes the key file whole or not at all.
func writeKey(path, key string) error {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, KeyFile+".*") // 0600
	if err != nil {
		return fmt.Errorf("write the API key: %w", err)
	}
	defer func() { _ = os.Remove(f.Name()) }() // gone already when it was published
	_, err = f.WriteString(key + "\n")
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("write the API key: %w", err)
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return fmt.Errorf("write the API key: %w", err)
	}
	return syncDir(dir)
}

func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("make the API key durable: %w", err)
	}
	if err := errors.Join(dir.Sync(), dir.Close()); err != nil {
		return fmt.Errorf("make the API key durable: %w", err)
	}
	return nil
}
