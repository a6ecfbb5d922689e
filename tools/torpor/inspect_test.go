package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"torpor/vmm/cow"
)

func TestDiskInspect(t *testing.T) {
	layer := filepath.Join(t.TempDir(), "1.layer")
	if err := cow.Create(layer, 64<<20); err != nil {
		t.Fatal(err)
	}
	if got := runApp(t, nil, "", "disk", "inspect", layer); got.code != 0 || !strings.Contains(got.stdout, "disk of 64 MiB, 0 blocks stored") {
		t.Errorf("%+v", got)
	}
	raw, err := os.ReadFile(layer)
	if err != nil {
		t.Fatal(err)
	}
	raw[0] ^= 1
	if err := os.WriteFile(layer, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := runApp(t, nil, "", "disk", "inspect", layer); got.code != 1 || !strings.Contains(got.stderr, layer) {
		t.Errorf("a flipped bit passed: %+v", got)
	}
}

func TestDiskInspectVerify(t *testing.T) {
	dir := t.TempDir()
	layer := filepath.Join(dir, "1.layer")
	if err := cow.Create(layer, 64<<20); err != nil {
		t.Fatal(err)
	}
	c, err := cow.OpenChain("", nil, layer)
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.WriteAt([]byte("precious"), 0)
	if err := errors.Join(err, c.Flush(), c.Close(), cow.Seal(layer)); err != nil {
		t.Fatal(err)
	}
	if got := runApp(t, nil, "", "disk", "inspect", "--verify", layer); got.code != 0 || !strings.Contains(got.stdout, "1 blocks stored (0.0 MiB), 0 known to be zero, format 2, sealed") {
		t.Errorf("%+v", got)
	}
	raw, err := os.ReadFile(layer)
	if err != nil {
		t.Fatal(err)
	}
	raw[bytes.Index(raw, []byte("precious"))] ^= 1
	if err := os.WriteFile(layer, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := runApp(t, nil, "", "disk", "inspect", layer); got.code != 0 {
		t.Errorf("without --verify the data was read: %+v", got)
	}
	if got := runApp(t, nil, "", "disk", "inspect", "--verify", layer); got.code != 1 || !strings.Contains(got.stderr, "block 0") {
		t.Errorf("a flipped bit passed: %+v", got)
	}
}

func TestSnapshotOfNothing(t *testing.T) {
	for _, verb := range []string{"inspect", "verify"} {
		if got := runApp(t, nil, "", "snapshot", verb, t.TempDir()); got.code != 1 || !strings.Contains(got.stderr, "vmstate") {
			t.Errorf("%s: %+v", verb, got)
		}
	}
}
