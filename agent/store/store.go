// Package store is the agent's one durable memory: a SQLite file with a row a sandbox, the events, and the templates' last
// build results. It is the only SQL of the agent, and knows nothing of what the states mean.
//
// A sandbox's row and the event that explains its change are written in one transaction. A write that has returned has
// been synced to the disk (WAL, synchronous=FULL): the state machine acts only after that.
package store

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"time"

	_ "github.com/mattn/go-sqlite3" // the driver
	"github.com/pressly/goose/v3"
)

//go:embed migrations/*.sql
var migrations embed.FS

// ErrUnknown says that there is no row of that id.
var ErrUnknown = errors.New("no such record")

// Store is safe for concurrent use.
type Store struct {
	db     *sql.DB
	before func(what string) error // called before each write of a sandbox, with what is written; nil: nothing is
}

// Watch has before called before every write of a sandbox or its events; an error is that of the write, which is not done. It is for tests
// that end the program there, and must not be called while the store is in use.
func (s *Store) Watch(before func(what string) error) { s.before = before }

func (s *Store) announce(what string) error {
	if s.before == nil {
		return nil
	}
	return s.before(what)
}

// Open opens or makes the database file and brings its schema up to date. A file written by a newer version is refused.
func Open(ctx context.Context, path string) (*Store, error) {
	dsn := url.URL{Scheme: "file", Opaque: (&url.URL{Path: path}).EscapedPath(), RawQuery: url.Values{
		"_journal_mode": {"WAL"},
		"_synchronous":  {"FULL"},
		"_busy_timeout": {"10000"},
		"_txlock":       {"immediate"},
	}.Encode()}
	db, err := sql.Open("sqlite3", dsn.String())
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	db.SetMaxOpenConns(1) // one writer; reads are rare and short
	if err := migrate(ctx, db); err != nil {
		return nil, errors.Join(fmt.Errorf("open %s: %w", path, err), db.Close())
	}
	return &Store{db: db}, nil
}

func migrate(ctx context.Context, db *sql.DB) error {
	dir, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return err
	}
	provider, err := goose.NewProvider(goose.DialectSQLite3, db, dir)
	if err != nil {
		return fmt.Errorf("read the migrations: %w", err)
	}
	if err := refuseNewer(ctx, provider); err != nil {
		return err
	}
	if _, err := provider.Up(ctx); err != nil {
		return fmt.Errorf("migrate the schema: %w", err)
	}
	return nil
}

func refuseNewer(ctx context.Context, provider *goose.Provider) error {
	have, newest, err := provider.GetVersions(ctx)
	if err != nil {
		return fmt.Errorf("read the schema version: %w", err)
	}
	if have > newest {
		return fmt.Errorf("the file has schema version %d, this program knows up to %d: start the newer torpor-agent", have, newest)
	}
	return nil
}

// Close closes the file.
func (s *Store) Close() error { return s.db.Close() }

func (s *Store) inTx(ctx context.Context, do func(*sql.Tx) error) error {
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	if err := do(tx); err != nil {
		return errors.Join(err, tx.Rollback())
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	return nil
}

// millis is the stored form of a time: unix milliseconds, 0 for the zero time.
func millis(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}

func fromMillis(ms int64) time.Time {
	if ms == 0 {
		return time.Time{}
	}
	return time.UnixMilli(ms).UTC()
}
