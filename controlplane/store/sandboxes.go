package store

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
)

// Sandbox is the row of one sandbox.
type Sandbox struct {
	ID          string
	TemplateID  string
	Metadata    map[string]string
	UserID      string // metadata.user_id
	AccessToken string // empty: not secured. The same for the whole life of the sandbox
	NodeID      string
	CreatedAt   time.Time // millisecond resolution
	DeletedAt   time.Time // zero while it should exist
}

const sandboxColumns = `id, template_id, metadata, user_id, access_token, node_id, created_at, deleted_at`

// Insert writes the rows of new sandboxes, all or none. It is called before the sandboxes exist.
func (s *Store) Insert(ctx context.Context, sandboxes ...Sandbox) error {
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("insert sandboxes: %w", err)
	}
	for _, sb := range sandboxes {
		if err := insert(ctx, tx, sb); err != nil {
			return errors.Join(fmt.Errorf("insert sandbox %s: %w", sb.ID, err), tx.Rollback())
		}
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("insert sandboxes: %w", err)
	}
	return nil
}

func insert(ctx context.Context, tx *sql.Tx, sb Sandbox) error {
	metadata, err := json.Marshal(sb.Metadata)
	if err != nil {
		return fmt.Errorf("encode metadata: %w", err)
	}
	_, err = tx.ExecContext(ctx,
		`INSERT INTO sandboxes (id, template_id, metadata, user_id, access_token, token_hash, node_id, created_at)
		 VALUES (?, ?, ?, ?, ?, ?, ?, ?)`,
		sb.ID, sb.TemplateID, string(metadata), sb.UserID, sb.AccessToken, tokenHash(sb.AccessToken), sb.NodeID,
		sb.CreatedAt.UnixMilli())
	return err
}

// Get returns the row of a sandbox that should exist; ErrNotFound for one that is unknown or deleted.
func (s *Store) Get(ctx context.Context, id string) (Sandbox, error) {
	sb, err := s.Record(ctx, id)
	if err == nil && !sb.DeletedAt.IsZero() {
		return Sandbox{}, ErrNotFound
	}
	return sb, err
}

// Record returns the row of a sandbox, deleted or not; ErrNotFound for one that never existed.
func (s *Store) Record(ctx context.Context, id string) (Sandbox, error) {
	rows, err := s.query(ctx, `WHERE id = ?`, id)
	if err != nil {
		return Sandbox{}, err
	}
	if len(rows) == 0 {
		return Sandbox{}, ErrNotFound
	}
	return rows[0], nil
}

// Live returns the rows, by id, of those of the given sandboxes that should exist.
func (s *Store) Live(ctx context.Context, ids []string) (map[string]Sandbox, error) {
	const batch = 500 // below SQLite's limit of bound parameters
	found := make(map[string]Sandbox, len(ids))
	for len(ids) > 0 {
		part := ids[:min(batch, len(ids))]
		ids = ids[len(part):]
		args := make([]any, len(part))
		for i, id := range part {
			args[i] = id
		}
		marks := strings.TrimSuffix(strings.Repeat("?,", len(part)), ",")
		rows, err := s.query(ctx, `WHERE deleted_at = 0 AND id IN (`+marks+`)`, args...)
		if err != nil {
			return nil, err
		}
		for _, sb := range rows {
			found[sb.ID] = sb
		}
	}
	return found, nil
}

// ByToken returns the sandbox that should exist and has this access token; ErrNotFound if there is none.
func (s *Store) ByToken(ctx context.Context, token string) (Sandbox, error) {
	if token == "" {
		return Sandbox{}, ErrNotFound
	}
	rows, err := s.query(ctx, `WHERE deleted_at = 0 AND token_hash = ?`, tokenHash(token))
	if err != nil {
		return Sandbox{}, err
	}
	for _, sb := range rows {
		if subtle.ConstantTimeCompare([]byte(sb.AccessToken), []byte(token)) == 1 {
			return sb, nil
		}
	}
	return Sandbox{}, ErrNotFound
}

// MarkDeleted records that a sandbox should not exist any more. first is false if that was known already.
func (s *Store) MarkDeleted(ctx context.Context, id string, at time.Time) (first bool, err error) {
	res, err := s.db.ExecContext(ctx, `UPDATE sandboxes SET deleted_at = ? WHERE id = ? AND deleted_at = 0`, at.UnixMilli(), id)
	if err != nil {
		return false, fmt.Errorf("mark sandbox %s deleted: %w", id, err)
	}
	n, err := res.RowsAffected()
	if err != nil {
		return false, fmt.Errorf("mark sandbox %s deleted: %w", id, err)
	}
	return n > 0, nil
}

func (s *Store) query(ctx context.Context, where string, args ...any) ([]Sandbox, error) {
	rows, err := s.db.QueryContext(ctx, `SELECT `+sandboxColumns+` FROM sandboxes `+where, args...)
	if err != nil {
		return nil, fmt.Errorf("read sandboxes: %w", err)
	}
	defer rows.Close()
	var found []Sandbox
	for rows.Next() {
		sb, err := scan(rows)
		if err != nil {
			return nil, fmt.Errorf("read sandboxes: %w", err)
		}
		found = append(found, sb)
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil {
		return nil, fmt.Errorf("read sandboxes: %w", err)
	}
	return found, nil
}

func scan(rows *sql.Rows) (Sandbox, error) {
	var sb Sandbox
	var metadata string
	var created, deleted int64
	err := rows.Scan(&sb.ID, &sb.TemplateID, &metadata, &sb.UserID, &sb.AccessToken, &sb.NodeID, &created, &deleted)
	if err != nil {
		return sb, err
	}
	if err := json.Unmarshal([]byte(metadata), &sb.Metadata); err != nil {
		return sb, fmt.Errorf("metadata of sandbox %s: %w", sb.ID, err)
	}
	sb.CreatedAt = time.UnixMilli(created).UTC()
	if deleted != 0 {
		sb.DeletedAt = time.UnixMilli(deleted).UTC()
	}
	return sb, nil
}

func tokenHash(token string) []byte {
	sum := sha256.Sum256([]byte(token))
	return sum[:]
}

// Deleted reports whether the sandbox has a row that says it should not exist. An unknown id is not deleted.
func (s *Store) Deleted(ctx context.Context, id string) (bool, error) {
	row, err := s.Record(ctx, id)
	if errors.Is(err, ErrNotFound) {
		return false, nil
	}
	return !row.DeletedAt.IsZero(), err
}
