package powercut

import (
	"os"
	"path/filepath"
	"testing"
)

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestOnlyWhatWasSyncedSurvives(t *testing.T) {
	root, trash := t.TempDir(), t.TempDir()
	in := func(name ...string) string { return filepath.Join(append([]string{root}, name...)...) }
	var points []string
	f := New(trash, func(p string) error { points = append(points, p); return nil })
	check(t, f.Mkdir(in("old")))
	check(t, f.Write(in("old", "a"), []byte("a")))
	check(t, f.SyncDir(in("old")))
	check(t, f.SyncDir(root))

	check(t, f.Mkdir(in("new.tmp")))
	check(t, f.Write(in("new.tmp", "kept"), nil))
	check(t, f.SyncDir(in("new.tmp")))
	check(t, f.Write(in("new.tmp", "lost"), nil))
	check(t, f.Rename(in("new.tmp"), in("new")))
	check(t, f.SyncDir(root))
	check(t, f.Link(in("old", "a"), in("new", "alsolost")))
	check(t, f.Remove(in("old", "a")))
	check(t, f.Rename(in("old"), in("moved")))
	if exists(in("moved", "a")) || !exists(in("new", "lost")) {
		t.Fatal("the operations were not done")
	}
	check(t, f.Cut())
	for path, want := range map[string]bool{
		in("old", "a"): true, in("moved"): false, in("new", "kept"): true, in("new", "lost"): false, in("new", "alsolost"): false,
	} {
		if exists(path) != want {
			t.Errorf("%s exists: %v", path, !want)
		}
	}
	if len(points) != 13 || points[12] != "rename moved" {
		t.Errorf("the points were %q", points)
	}
}
