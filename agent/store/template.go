package store

import (
	"context"
	"fmt"
	"time"
)

// Template is the result of the last build of a template.
type Template struct {
	ID        string
	Digest    string
	State     string // ready | failed
	Error     string
	UpdatedAt time.Time
}

// PutTemplate writes a template's row.
func (s *Store) PutTemplate(ctx context.Context, t Template) error {
	_, err := s.db.ExecContext(ctx, `INSERT INTO templates (id, digest, state, error, updated_at) VALUES (?1,?2,?3,?4,?5)
		ON CONFLICT (id) DO UPDATE SET digest=?2, state=?3, error=?4, updated_at=?5`,
		t.ID, t.Digest, t.State, t.Error, millis(t.UpdatedAt))
	if err != nil {
		return fmt.Errorf("store template %s: %w", t.ID, err)
	}
	return nil
}

// Templates returns every row, in the order of the ids.
func (s *Store) Templates(ctx context.Context) ([]Template, error) {
	rows, err := s.db.QueryContext(ctx, `SELECT id, digest, state, error, updated_at FROM templates ORDER BY id`)
	if err != nil {
		return nil, fmt.Errorf("read the templates: %w", err)
	}
	defer rows.Close()
	var all []Template
	for rows.Next() {
		var (
			t  Template
			at int64
		)
		if err := rows.Scan(&t.ID, &t.Digest, &t.State, &t.Error, &at); err != nil {
			return nil, fmt.Errorf("read the templates: %w", err)
		}
		t.UpdatedAt = fromMillis(at)
		all = append(all, t)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("read the templates: %w", err)
	}
	return all, nil
}
