package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"
)

// Snapshot is the row of one snapshot.
type Snapshot struct {
	ID         string
	SandboxID  string // whose state it is
	TemplateID string // of that sandbox
	Name, Tag  string // both empty: it has only its id
	NodeID     string
	CreatedAt  time.Time // millisecond resolution
	DeletedAt  time.Time // zero while it should exist
}

// SnapshotFilter picks rows. Empty fields pick all.
type SnapshotFilter struct {
	SandboxID string
	ID        string
	Name, Tag string
}

const snapshotColumns = `id, sandbox_id, template_id, name, tag, node_id, created_at, deleted_at`

// InsertSnapshot writes a row for a snapshot that is about to be made. It is not listed before SnapshotReady.
func (s *Store) InsertSnapshot(ctx context.Context, sn Snapshot) error {
	_, err := s.db.ExecContext(ctx,
		`INSERT INTO snapshots (id, sandbox_id, template_id, name, tag, node_id, created_at) VALUES (?, ?, ?, ?, ?, ?, ?)`,
		sn.ID, sn.SandboxID, sn.TemplateID, sn.Name, sn.Tag, sn.NodeID, sn.CreatedAt.UnixMilli())
	if err != nil {
		return fmt.Errorf("insert snapshot %s: %w", sn.ID, err)
	}
	return nil
}

// SnapshotReady records that the node has the snapshot. Its name, if it has one, is taken from whichever had it before; that one
// keeps its id. ErrNotFound if it was deleted meanwhile.
func (s *Store) SnapshotReady(ctx context.Context, id string) error {
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("snapshot %s is ready: %w", id, err)
	}
	if err := ready(ctx, tx, id); err != nil {
		return errors.Join(fmt.Errorf("snapshot %s is ready: %w", id, err), tx.Rollback())
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("snapshot %s is ready: %w", id, err)
	}
	return nil
}

func ready(ctx context.Context, tx *sql.Tx, id string) error {
	_, err := tx.ExecContext(ctx, `UPDATE snapshots SET name = '', tag = '' WHERE id <> ?1 AND deleted_at = 0 AND ready = 1 AND name <> ''
		AND (name, tag) = (SELECT name, tag FROM snapshots WHERE id = ?1)`, id)
	if err != nil {
		return err
	}
	res, err := tx.ExecContext(ctx, `UPDATE snapshots SET ready = 1 WHERE id = ? AND deleted_at = 0`, id)
	if err != nil {
		return err
	}
	if n, err := res.RowsAffected(); err != nil || n == 0 {
		return errors.Join(err, ErrNotFound)
	}
	return nil
}

// Snapshots returns the rows of those that should exist and are ready, newest first, ties by id.
func (s *Store) Snapshots(ctx context.Context, f SnapshotFilter) ([]Snapshot, error) {
	return s.querySnapshots(ctx, `WHERE deleted_at = 0 AND ready = 1 AND (?1 = '' OR sandbox_id = ?1) AND (?2 = '' OR id = ?2)
		AND (?3 = '' OR name = ?3) AND (?4 = '' OR tag = ?4) ORDER BY created_at DESC, id`, f.SandboxID, f.ID, f.Name, f.Tag)
}

// MarkSnapshotDeleted records that a snapshot should not exist any more. first is false if that was known already.
func (s *Store) MarkSnapshotDeleted(ctx context.Context, id string, at time.Time) (first bool, err error) {
	res, err := s.db.ExecContext(ctx, `UPDATE snapshots SET deleted_at = ? WHERE id = ? AND deleted_at = 0`, at.UnixMilli(), id)
	if err != nil {
		return false, fmt.Errorf("mark snapshot %s deleted: %w", id, err)
	}
	n, err := res.RowsAffected()
	if err != nil {
		return false, fmt.Errorf("mark snapshot %s deleted: %w", id, err)
	}
	return n > 0, nil
}

// AbandonSnapshots marks as deleted what was being made when the control plane ended: nobody was told of it.
func (s *Store) AbandonSnapshots(ctx context.Context, at time.Time) error {
	_, err := s.db.ExecContext(ctx, `UPDATE snapshots SET deleted_at = ? WHERE ready = 0 AND deleted_at = 0`, at.UnixMilli())
	if err != nil {
		return fmt.Errorf("abandon unfinished snapshots: %w", err)
	}
	return nil
}

// SnapshotDeleted reports whether the snapshot has a row that says it should not exist. An unknown id is not deleted.
func (s *Store) SnapshotDeleted(ctx context.Context, id string) (bool, error) {
	rows, err := s.querySnapshots(ctx, `WHERE id = ? AND deleted_at <> 0`, id)
	return len(rows) > 0, err
}

func (s *Store) querySnapshots(ctx context.Context, where string, args ...any) ([]Snapshot, error) {
	rows, err := s.db.QueryContext(ctx, `SELECT `+snapshotColumns+` FROM snapshots `+where, args...)
	if err != nil {
		return nil, fmt.Errorf("read snapshots: %w", err)
	}
	defer rows.Close()
	var found []Snapshot
	for rows.Next() {
		var sn Snapshot
		var created, deleted int64
		if err := rows.Scan(&sn.ID, &sn.SandboxID, &sn.TemplateID, &sn.Name, &sn.Tag, &sn.NodeID, &created, &deleted); err != nil {
			return nil, fmt.Errorf("read snapshots: %w", err)
		}
		sn.CreatedAt = time.UnixMilli(created).UTC()
		if deleted != 0 {
			sn.DeletedAt = time.UnixMilli(deleted).UTC()
		}
		found = append(found, sn)
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil {
		return nil, fmt.Errorf("read snapshots: %w", err)
	}
	return found, nil
}
