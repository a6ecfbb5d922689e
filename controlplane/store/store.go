// Package store is the durable memory of the control plane: what should exist, for whom, and where. It holds the only SQL
// of the component, over SQLite. What runs is not here; the agents know that.
//
// Every write is on the disk when the call returns (WAL with synchronous=FULL), so that a row always exists before the VM
// it stands for. A Store is safe for concurrent use.
package store

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"net/url"

	"github.com/mattn/go-sqlite3" // also the "sqlite3" driver
	"github.com/pressly/goose/v3"
)

//go:embed migrations/*.sql
var migrations embed.FS

// ErrNotFound is returned for a row that does not exist.
var ErrNotFound = errors.New("no such row")

// Store is one open database.
type Store struct {
	db *sql.DB
}

// Open opens or makes the database file at path and brings its schema up to date.
func Open(ctx context.Context, path string) (*Store, error) {
	dsn := (&url.URL{Scheme: "file", Opaque: url.PathEscape(path), RawQuery: url.Values{
		"_journal_mode": {"WAL"},
		"_synchronous":  {"FULL"},
		"_busy_timeout": {"5000"},
		"_foreign_keys": {"on"},
		"_txlock":       {"immediate"},
	}.Encode()}).String()
	db, err := sql.Open("sqlite3", dsn)
	if err != nil {
		return nil, fmt.Errorf("open database %s: %w", path, err)
	}
	if err := migrate(ctx, db); err != nil {
		return nil, errors.Join(fmt.Errorf("bring database %s up to date: %w", path, err), db.Close())
	}
	return &Store{db: db}, nil
}

func migrate(ctx context.Context, db *sql.DB) error {
	files, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return err
	}
	provider, err := goose.NewProvider(goose.DialectSQLite3, db, files)
	if err != nil {
		return err
	}
	_, err = provider.Up(ctx)
	return err
}

// Close flushes and closes the database.
func (s *Store) Close() error { return s.db.Close() }

// IsFull reports whether err says that the database's disk is full.
func IsFull(err error) bool {
	var e sqlite3.Error
	return errors.As(err, &e) && e.Code == sqlite3.ErrFull
}
