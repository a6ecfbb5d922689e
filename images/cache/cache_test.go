package cache

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestPublishFirstWins(t *testing.T) {
	s := open(t)
	for _, content := range []string{"first", "second"} {
		path, err := s.Publish("thing-1", func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "f"), []byte(content), 0o644)
		})
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(filepath.Join(path, "f"))
		if err != nil || string(got) != "first" {
			t.Errorf("after publishing %q: %q, %v; want the first", content, got, err)
		}
	}
	if names := list(t, s); len(names) != 1 {
		t.Errorf("left in the cache: %v", names)
	}
}

func TestPublishFailureLeavesNothing(t *testing.T) {
	s := open(t)
	want := errors.New("no")
	if _, err := s.Publish("thing-1", func(string) error { return want }); !errors.Is(err, want) {
		t.Fatalf("error %v, want %v", err, want)
	}
	if names := list(t, s); len(names) != 0 {
		t.Errorf("left in the cache: %v", names)
	}
}

func TestFollow(t *testing.T) {
	s := open(t)
	if _, ok := s.Follow("current"); ok {
		t.Error("followed an alias that is not there")
	}
	for _, name := range []string{"a", "b"} {
		if err := os.Mkdir(s.Path(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := s.Point("current", name); err != nil {
			t.Fatal(err)
		}
		if got, ok := s.Follow("current"); !ok || got != name {
			t.Errorf("Follow = %q, %v; want %q", got, ok, name)
		}
	}
	if err := os.Remove(s.Path("b")); err != nil {
		t.Fatal(err)
	}
	if _, ok := s.Follow("current"); ok {
		t.Error("followed an alias whose entry has gone")
	}
	if err := s.Point("outside", "../elsewhere"); err != nil {
		t.Fatal(err)
	}
	if _, ok := s.Follow("outside"); ok {
		t.Error("followed an alias out of the cache")
	}
}

func TestLockExcludesAndSweeps(t *testing.T) {
	s := open(t)
	unlock, err := s.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	left, _, err := s.Temp()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*lockPoll)
	defer cancel()
	if _, err := s.Lock(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("second lock: %v, want to wait", err)
	}
	unlock()
	unlock, err = s.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	if _, err := os.Stat(left); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("scratch directory of a stopped build is still there: %v", err)
	}
}

func open(t *testing.T) *Store {
	t.Helper()
	s, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func list(t *testing.T, s *Store) []string {
	t.Helper()
	entries, err := os.ReadDir(s.Root())
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}
