package snapcache

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// What two snapshots share outlives either, and is described alike in both without being read.
func TestLinkedFilesOutliveTheirOrigin(t *testing.T) {
	dir := t.TempDir()
	first, err := Begin(filepath.Join(dir, "first"))
	if err != nil {
		t.Fatal(err)
	}
	data := bytes.Repeat([]byte("memory"), 10_000)
	if err := os.WriteFile(first.Path("mem"), data, 0o600); err != nil {
		t.Fatal(err)
	}
	origin, err := first.Publish(Manifest{Kind: "generation"})
	if err != nil {
		t.Fatal(err)
	}
	layer := filepath.Join(dir, "7.layer")
	if err := os.WriteFile(layer, []byte("blocks"), 0o600); err != nil {
		t.Fatal(err)
	}

	second, err := Begin(filepath.Join(dir, "second"))
	if err != nil {
		t.Fatal(err)
	}
	if err := second.Link(origin, "mem", "base"); err != nil {
		t.Fatal(err)
	}
	if err := second.LinkLayer(layer, "0.layer"); err != nil {
		t.Fatal(err)
	}
	copied, err := second.Publish(Manifest{Kind: "kept", Layers: []string{"0.layer"}})
	if err != nil {
		t.Fatal(err)
	}
	if got := copied.Manifest.Files; len(got) != 1 || got[0].Name != "base" || got[0].CRC32C != origin.Manifest.Files[0].CRC32C {
		t.Errorf("files %+v", got)
	}
	if err := errors.Join(Remove(origin.Dir), os.Remove(layer)); err != nil {
		t.Fatal(err)
	}
	loaded, err := Load(copied.Dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := loaded.Verify(); err != nil {
		t.Error(err)
	}
	for name, want := range map[string][]byte{"base": data, "0.layer": []byte("blocks")} {
		if got, err := os.ReadFile(loaded.Path(name)); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
	}
}

func TestLinkRefusesWhatIsNotThere(t *testing.T) {
	d, err := Begin(filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	from := &Snapshot{Dir: t.TempDir(), Manifest: Manifest{Files: []File{{Name: "gone"}}}}
	if err := d.Link(from, "unnamed", "a"); !errors.Is(err, ErrCorrupt) {
		t.Errorf("a file that no manifest names: %v", err)
	}
	if err := d.Link(from, "gone", "a"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file that is missing: %v", err)
	}
	if err := d.LinkLayer(filepath.Join(from.Dir, "1.layer"), "a"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a layer that is missing: %v", err)
	}
}
