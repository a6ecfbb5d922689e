package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"
)

// Sandbox is everything about a sandbox that must survive the agent.
type Sandbox struct {
	ID             string
	TemplateID     string
	TemplateDigest string
	Token          string // access token of the data plane; empty: not secured
	Env            map[string]string
	OnTimeout      string // kill | pause
	AutoResume     bool
	Timeout        time.Duration // asked for at create; whole seconds
	VCPUs          uint32
	MemoryBytes    uint64
	DiskBytes      uint64

	State  string
	Reason string
	Since  time.Time

	CreatedAt time.Time
	StartedAt time.Time // of this run; zero if it never was ready
	EndAt     time.Time // deadline while running, time of the pause when paused
	RemovedAt time.Time // not zero: only the memory of it is left

	Incarnation uint64   // counts every start of the VM, never reused
	Generation  uint64   // of the newest published snapshot, 0 = none
	NextGen     uint64   // number of the next one, never reused
	Base        uint64   // generation that the VM was restored from, 0 = none: from the template, or booted
	Booted      bool     // the VM was booted, not restored: its memory builds on nothing
	ResumeMode  string   // what the VM began from: none | frozen | memory | previous | cold
	Layers      []string // own disk layers, file names, oldest first
	NextLayer   uint64   // number of the next layer file, never reused
	EnvdVersion string
	Proc        Proc // the VMM, if there may be one
}

// Proc identifies a process until the host restarts.
type Proc struct {
	PID   int
	Start uint64
	Boot  string
}

// Clone returns a deep copy.
func (s Sandbox) Clone() Sandbox {
	s.Env = maps.Clone(s.Env)
	s.Layers = slices.Clone(s.Layers)
	return s
}

// Put writes the row whole and appends the events, in one transaction.
func (s *Store) Put(ctx context.Context, sb Sandbox, events ...Event) error {
	if err := s.announce("record " + sb.State); err != nil {
		return fmt.Errorf("store sandbox %s: %w", sb.ID, err)
	}
	env, err := json.Marshal(sb.Env)
	if err != nil {
		return fmt.Errorf("store sandbox %s: %w", sb.ID, err)
	}
	layers, err := json.Marshal(sb.Layers)
	if err != nil {
		return fmt.Errorf("store sandbox %s: %w", sb.ID, err)
	}
	err = s.inTx(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO sandboxes (id, template_id, template_digest, token, env, on_timeout,
			auto_resume, timeout_seconds, vcpus, memory_bytes, disk_bytes, state, reason, since, created_at, started_at, end_at,
			removed_at, incarnation, generation, layers, next_layer, envd_version, proc_pid, proc_start, proc_boot,
			next_generation, base, booted, resume_mode)
			VALUES (?1,?2,?3,?4,?5,?6,?7,?8,?9,?10,?11,?12,?13,?14,?15,?16,?17,?18,?19,?20,?21,?22,?23,?24,?25,?26,?27,?28,?29,?30)
			ON CONFLICT (id) DO UPDATE SET template_id=?2, template_digest=?3, token=?4, env=?5, on_timeout=?6, auto_resume=?7,
			timeout_seconds=?8, vcpus=?9, memory_bytes=?10, disk_bytes=?11, state=?12, reason=?13, since=?14, created_at=?15,
			started_at=?16, end_at=?17, removed_at=?18, incarnation=?19, generation=?20, layers=?21, next_layer=?22,
			envd_version=?23, proc_pid=?24, proc_start=?25, proc_boot=?26, next_generation=?27, base=?28, booted=?29,
			resume_mode=?30`,
			sb.ID, sb.TemplateID, sb.TemplateDigest, sb.Token, string(env), sb.OnTimeout,
			sb.AutoResume, int64(sb.Timeout/time.Second), sb.VCPUs, int64(sb.MemoryBytes), int64(sb.DiskBytes),
			sb.State, sb.Reason, millis(sb.Since), millis(sb.CreatedAt), millis(sb.StartedAt), millis(sb.EndAt),
			millis(sb.RemovedAt), int64(sb.Incarnation), int64(sb.Generation), string(layers), int64(sb.NextLayer),
			sb.EnvdVersion, sb.Proc.PID, int64(sb.Proc.Start), sb.Proc.Boot,
			int64(sb.NextGen), int64(sb.Base), sb.Booted, sb.ResumeMode)
		if err != nil {
			return err
		}
		return appendEvents(ctx, tx, sb.ID, events)
	})
	if err != nil {
		return fmt.Errorf("store sandbox %s: %w", sb.ID, err)
	}
	return nil
}

// Sandboxes returns every row, the removed ones too, in the order of their ids.
func (s *Store) Sandboxes(ctx context.Context) ([]Sandbox, error) {
	rows, err := s.db.QueryContext(ctx, selectSandbox+` ORDER BY id`)
	if err != nil {
		return nil, fmt.Errorf("read the sandboxes: %w", err)
	}
	defer rows.Close()
	var all []Sandbox
	for rows.Next() {
		sb, err := scanSandbox(rows.Scan)
		if err != nil {
			return nil, fmt.Errorf("read the sandboxes: %w", err)
		}
		all = append(all, sb)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("read the sandboxes: %w", err)
	}
	return all, nil
}

// Sandbox returns one row; ErrUnknown if there is none.
func (s *Store) Sandbox(ctx context.Context, id string) (Sandbox, error) {
	sb, err := scanSandbox(s.db.QueryRowContext(ctx, selectSandbox+` WHERE id = ?`, id).Scan)
	if errors.Is(err, sql.ErrNoRows) {
		err = ErrUnknown
	}
	if err != nil {
		return Sandbox{}, fmt.Errorf("read sandbox %s: %w", id, err)
	}
	return sb, nil
}

const selectSandbox = `SELECT id, template_id, template_digest, token, env, on_timeout, auto_resume, timeout_seconds, vcpus,
	memory_bytes, disk_bytes, state, reason, since, created_at, started_at, end_at, removed_at, incarnation, generation, layers,
	next_layer, envd_version, proc_pid, proc_start, proc_boot, next_generation, base, booted, resume_mode FROM sandboxes`

func scanSandbox(scan func(...any) error) (Sandbox, error) {
	var (
		sb                                               Sandbox
		env, layers                                      string
		timeout, since, created, started, ended, removed int64
	)
	err := scan(&sb.ID, &sb.TemplateID, &sb.TemplateDigest, &sb.Token, &env, &sb.OnTimeout, &sb.AutoResume, &timeout, &sb.VCPUs,
		&sb.MemoryBytes, &sb.DiskBytes, &sb.State, &sb.Reason, &since, &created, &started, &ended, &removed, &sb.Incarnation,
		&sb.Generation, &layers, &sb.NextLayer, &sb.EnvdVersion, &sb.Proc.PID, &sb.Proc.Start, &sb.Proc.Boot,
		&sb.NextGen, &sb.Base, &sb.Booted, &sb.ResumeMode)
	if err != nil {
		return Sandbox{}, err
	}
	sb.Timeout = time.Duration(timeout) * time.Second
	sb.Since, sb.CreatedAt, sb.StartedAt = fromMillis(since), fromMillis(created), fromMillis(started)
	sb.EndAt, sb.RemovedAt = fromMillis(ended), fromMillis(removed)
	if err := json.Unmarshal([]byte(env), &sb.Env); err != nil {
		return Sandbox{}, fmt.Errorf("environment of %s: %w", sb.ID, err)
	}
	if err := json.Unmarshal([]byte(layers), &sb.Layers); err != nil {
		return Sandbox{}, fmt.Errorf("layers of %s: %w", sb.ID, err)
	}
	return sb, nil
}
