package snapcache

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"torpor/agent/powercut"
)

func draft(t *testing.T, dir, content string) *Draft {
	t.Helper()
	d, err := Begin(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"vmstate", "mem.diff"} {
		if err := os.WriteFile(d.Path(name), []byte(content+name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

func publish(t *testing.T, dir, content string) *Snapshot {
	t.Helper()
	s, err := draft(t, dir, content).Publish(Manifest{Kind: "generation", Layers: []string{"1.layer"}})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestPublishedSnapshotLoadsAndVerifies(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "gen-1")
	publish(t, dir, "x")
	s, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Verify(); err != nil {
		t.Error(err)
	}
	if len(s.Manifest.Files) != 2 || s.Manifest.Layers[0] != "1.layer" || s.Manifest.Version != Version {
		t.Errorf("manifest %+v", s.Manifest)
	}
	if _, err := Begin(dir); !errors.Is(err, ErrExists) {
		t.Errorf("a published name was given out again: %v", err)
	}
}

// Every prefix of the commit sequence leaves generation 1 whole, and generation 2 either whole or not there, whether what was not
// synced is lost or not.
func TestCrashAtEveryStepOfPublish(t *testing.T) {
	points := recordPublish(t)
	t.Logf("%d cut points: %q", len(points), points)
	if len(points) < 8 {
		t.Errorf("only %d", len(points))
	}
	renamed, parentSynced := slices.Index(points, "rename gen-2"), len(points)
	for i, point := range append(points, "the end") {
		for _, power := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/power=%v", point, power), func(t *testing.T) {
				root := t.TempDir()
				publish(t, filepath.Join(root, "gen-1"), "old")
				fs, err := publishOn(t, root, i)
				if (err == nil) != (i == parentSynced) {
					t.Fatalf("publish: %v", err)
				}
				if power {
					if err := fs.Cut(); err != nil {
						t.Fatal(err)
					}
				}
				if _, err := Sweep(root, "gen-"); err != nil {
					t.Fatal(err)
				}
				checkWhole(t, filepath.Join(root, "gen-1"))
				_, err = os.Stat(filepath.Join(root, "gen-2"))
				if err == nil {
					checkWhole(t, filepath.Join(root, "gen-2"))
				} else if i == parentSynced || i > renamed && !power {
					t.Error("the published snapshot is lost")
				}
				left, err := filepath.Glob(filepath.Join(root, "*"+tmpSuffix))
				if err != nil || len(left) > 0 {
					t.Errorf("left behind: %v %v", left, err)
				}
			})
		}
	}
}

// publishOn publishes generation 2 of root with a file of generation 1, and ends before operation n.
func publishOn(t *testing.T, root string, n int, seen ...*[]string) (*powercut.FS, error) {
	t.Helper()
	count := 0
	fs := powercut.New(t.TempDir(), func(point string) error {
		for _, s := range seen {
			*s = append(*s, point)
		}
		if count++; count > n {
			return errors.New("the program has ended")
		}
		return nil
	})
	first, err := Load(filepath.Join(root, "gen-1"))
	if err != nil {
		t.Fatal(err)
	}
	d, err := Cache{fs}.Begin(filepath.Join(root, "gen-2"))
	if err != nil {
		return fs, err
	}
	if err := d.Link(first, "mem.diff", "mem.1"); err != nil {
		return fs, err
	}
	if err := os.WriteFile(d.Path("vmstate"), []byte("new"), 0o600); err != nil {
		t.Fatal(err)
	}
	fs.Made(d.Path("vmstate"))
	_, err = d.Publish(Manifest{Memory: []string{"mem.1"}})
	return fs, err
}

func recordPublish(t *testing.T) (points []string) {
	t.Helper()
	root := t.TempDir()
	publish(t, filepath.Join(root, "gen-1"), "old")
	if _, err := publishOn(t, root, 1<<30, &points); err != nil {
		t.Fatal(err)
	}
	return points
}

func checkWhole(t *testing.T, dir string) {
	t.Helper()
	s, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Verify(); err != nil {
		t.Fatal(err)
	}
}

func TestRemoveCutAfterTheManifestLeavesNoSnapshot(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "gen-1")
	publish(t, dir, "x")
	if err := os.Remove(filepath.Join(dir, manifestName)); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(dir); !errors.Is(err, ErrNotExist) {
		t.Errorf("got %v", err)
	}
	if removed, err := Sweep(root, "gen-"); err != nil || len(removed) != 1 {
		t.Errorf("swept %v, %v", removed, err)
	}
	if err := Remove(dir); err != nil {
		t.Errorf("removing nothing: %v", err)
	}
}

func TestDamageIsATypedErrorThatNamesThePart(t *testing.T) {
	for name, tc := range map[string]struct {
		part   string
		damage func(path string) error
	}{
		"flipped bit": {"mem.diff", func(p string) error { return flip(p) }},
		"truncated":   {"vmstate", func(p string) error { return os.Truncate(p, 3) }},
		"missing":     {"vmstate", os.Remove},
		"manifest":    {manifestName, func(p string) error { return flip(p) }},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "gen-1")
			publish(t, dir, "content")
			if err := tc.damage(filepath.Join(dir, tc.part)); err != nil {
				t.Fatal(err)
			}
			s, err := Load(dir)
			if err == nil {
				err = s.Verify()
			}
			var part *PartError
			if !errors.As(err, &part) || part.Part != tc.part || !errors.Is(err, ErrCorrupt) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func flip(path string) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	raw[len(raw)/2] ^= 1
	return os.WriteFile(path, raw, 0o600)
}

func TestNewerVersionIsRefusedByName(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "gen-1")
	publish(t, dir, "x")
	raw, err := encodeManifest(Manifest{Version: Version + 1})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, manifestName), raw, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(dir); !errors.Is(err, ErrVersion) {
		t.Errorf("got %v", err)
	}
}

func TestChecksumOfASparseFileAndItsDenseCopyAgree(t *testing.T) {
	dir := t.TempDir()
	data := make([]byte, 3*chunkSize+100)
	copy(data[2*chunkSize+5:], "something")
	dense, sparse := filepath.Join(dir, "dense"), filepath.Join(dir, "sparse")
	if err := os.WriteFile(dense, data, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(sparse)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(int64(len(data))); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("something"), 2*chunkSize+5); err != nil {
		t.Fatal(err)
	}
	f.Close()
	if a, b := sumOf(t, dense), sumOf(t, sparse); a != b {
		t.Errorf("dense %s, sparse %s", a, b)
	}
	moved := bytes.Clone(data)
	copy(moved, data[chunkSize:]) // the same bytes at another place
	clear(moved[2*chunkSize:])
	if err := os.WriteFile(dense, moved, 0o600); err != nil {
		t.Fatal(err)
	}
	if sumOf(t, dense) == sumOf(t, sparse) {
		t.Error("moved data has the same checksum")
	}
}

func sumOf(t *testing.T, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	sum, err := checksum(f)
	if err != nil {
		t.Fatal(err)
	}
	return sum
}

func FuzzDecodeManifest(f *testing.F) {
	good, err := encodeManifest(Manifest{Version: 1, Files: []File{{Name: "vmstate", Size: 1}}, Layers: []string{"1.layer"}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte(`{"manifest":{},"sha256":""}`))
	f.Add([]byte(`{}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		m, err := decodeManifest(raw)
		if err != nil {
			return
		}
		again, err := encodeManifest(m)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := decodeManifest(again); err != nil {
			t.Fatalf("accepted, but not after encoding again: %v", err)
		}
	})
}
