package auth_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"torpor/controlplane/auth"
	"torpor/controlplane/store"
)

// load opens dir's database, loads its keys, and closes the database again.
func load(t *testing.T, dir string) (*auth.Keys, error) {
	t.Helper()
	s, err := store.Open(t.Context(), filepath.Join(dir, "db"))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	return auth.Load(t.Context(), dir, s)
}

func keyOf(t *testing.T, dir string) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(dir, auth.KeyFile))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(raw))
}

func TestFirstStartMakesAPrivateKeyThatStays(t *testing.T) {
	dir := t.TempDir()
	keys, err := load(t, dir)
	if err != nil {
		t.Fatal(err)
	}
	key := keyOf(t, dir)
	if !regexp.MustCompile(`^e2b_[0-9a-f]{40}$`).MatchString(key) {
		t.Errorf("key %q", key)
	}
	if info, err := os.Stat(filepath.Join(dir, auth.KeyFile)); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", info.Mode(), err)
	}
	for try, want := range map[string]bool{key: true, key + "0": false, key[:len(key)-1]: false, "": false, strings.ToUpper(key): false} {
		if keys.Valid(try) != want {
			t.Errorf("Valid(%q) = %v", try, !want)
		}
	}
	again, err := load(t, dir)
	if err != nil || !again.Valid(key) || keyOf(t, dir) != key {
		t.Error("the key changed with a restart", err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, auth.KeyFile+"*")); len(left) != 1 {
		t.Errorf("left behind: %v", left)
	}
}

func TestKeyIsNotInTheDatabase(t *testing.T) {
	dir := t.TempDir()
	if _, err := load(t, dir); err != nil {
		t.Fatal(err)
	}
	files, _ := filepath.Glob(filepath.Join(dir, "db*"))
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if err != nil || strings.Contains(string(raw), keyOf(t, dir)) {
			t.Errorf("%s holds the key (%v)", f, err)
		}
	}
}

func TestFileAndDatabaseAreCrossChecked(t *testing.T) {
	dir := t.TempDir()
	if _, err := load(t, dir); err != nil {
		t.Fatal(err)
	}
	first, file := keyOf(t, dir), filepath.Join(dir, auth.KeyFile)

	// The file was lost: a new key is made, and the old one, which somebody may hold, stays good.
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	keys, err := load(t, dir)
	if second := keyOf(t, dir); err != nil || second == first || !keys.Valid(first) || !keys.Valid(second) {
		t.Error("after the file was lost", err)
	}
	// The database was lost: the file's key is believed. Its mode is put right.
	second := keyOf(t, dir)
	dbs, _ := filepath.Glob(filepath.Join(dir, "db*"))
	for _, f := range dbs {
		os.Remove(f)
	}
	os.Chmod(file, 0o644)
	keys, err = load(t, dir)
	if info, _ := os.Stat(file); err != nil || !keys.Valid(second) || keys.Valid(first) || info.Mode().Perm() != 0o600 {
		t.Error("after the database was lost", err)
	}
	// The file is damaged: nothing is guessed.
	if err := os.WriteFile(file, []byte("e2b_short\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := load(t, dir); err == nil || strings.Contains(err.Error(), "short") || !strings.Contains(err.Error(), "remove it") {
		t.Errorf("damaged file: %v", err)
	}
}
