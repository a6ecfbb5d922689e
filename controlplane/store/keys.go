package store

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"time"
)

// KeyHash is what is kept of an API key.
type KeyHash [sha256.Size]byte

// HashKey returns what is kept of key.
func HashKey(key string) KeyHash { return sha256.Sum256([]byte(key)) }

// AddKey remembers a key by its hash. A key that is known already stays as it is.
func (s *Store) AddKey(ctx context.Context, hash KeyHash, name string, at time.Time) error {
	_, err := s.db.ExecContext(ctx, `INSERT INTO api_keys (hash, name, created_at) VALUES (?, ?, ?) ON CONFLICT DO NOTHING`,
		hash[:], name, at.UnixMilli())
	if err != nil {
		return fmt.Errorf("add API key %q: %w", name, err)
	}
	return nil
}

// Keys returns the hashes of all keys.
func (s *Store) Keys(ctx context.Context) ([]KeyHash, error) {
	rows, err := s.db.QueryContext(ctx, `SELECT hash FROM api_keys`)
	if err != nil {
		return nil, fmt.Errorf("read API keys: %w", err)
	}
	defer rows.Close()
	var keys []KeyHash
	for rows.Next() {
		var raw []byte
		if err := rows.Scan(&raw); err != nil {
			return nil, fmt.Errorf("read API keys: %w", err)
		}
		if len(raw) != sha256.Size {
			return nil, errors.New("read API keys: a hash has the wrong length")
		}
		keys = append(keys, KeyHash(raw))
	}
	return keys, rows.Err()
}
