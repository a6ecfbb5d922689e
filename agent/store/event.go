package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"time"
)

// Event is one transition, with its reason.
type Event struct {
	Seq         uint64 // given by the store, grows
	At          time.Time
	Type        string // vm | envd | snapshot
	From, To    string
	Reason      string
	Incarnation uint64
	Phases      map[string]float64 // milliseconds, by name of the phase
}

func appendEvents(ctx context.Context, tx *sql.Tx, sandboxID string, events []Event) error {
	for _, e := range events {
		phases, err := json.Marshal(e.Phases)
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `INSERT INTO events (sandbox_id, at, type, from_state, to_state, reason, incarnation, phases)
			VALUES (?,?,?,?,?,?,?,?)`, sandboxID, millis(e.At), e.Type, e.From, e.To, e.Reason, int64(e.Incarnation), string(phases))
		if err != nil {
			return err
		}
	}
	return nil
}

// Append adds events without touching the sandbox's row.
func (s *Store) Append(ctx context.Context, sandboxID string, events ...Event) error {
	if err := s.announce("record event"); err != nil {
		return fmt.Errorf("store events of %s: %w", sandboxID, err)
	}
	if err := s.inTx(ctx, func(tx *sql.Tx) error { return appendEvents(ctx, tx, sandboxID, events) }); err != nil {
		return fmt.Errorf("store events of %s: %w", sandboxID, err)
	}
	return nil
}

// Events returns up to limit events of a sandbox with a sequence number above after, oldest first.
func (s *Store) Events(ctx context.Context, sandboxID string, after uint64, limit int) ([]Event, error) {
	rows, err := s.db.QueryContext(ctx, `SELECT seq, at, type, from_state, to_state, reason, incarnation, phases FROM events
		WHERE sandbox_id = ? AND seq > ? ORDER BY seq LIMIT ?`, sandboxID, int64(after), limit)
	if err != nil {
		return nil, fmt.Errorf("read events of %s: %w", sandboxID, err)
	}
	defer rows.Close()
	var events []Event
	for rows.Next() {
		var (
			e      Event
			at     int64
			phases string
		)
		if err := rows.Scan(&e.Seq, &at, &e.Type, &e.From, &e.To, &e.Reason, &e.Incarnation, &phases); err != nil {
			return nil, fmt.Errorf("read events of %s: %w", sandboxID, err)
		}
		e.At = fromMillis(at)
		if err := json.Unmarshal([]byte(phases), &e.Phases); err != nil {
			return nil, fmt.Errorf("phases of event %d: %w", e.Seq, err)
		}
		events = append(events, e)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("read events of %s: %w", sandboxID, err)
	}
	return events, nil
}
