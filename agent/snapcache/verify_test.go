package snapcache

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// A sum that the writer of a file knows is taken over, and is what the file is compared with.
func TestKnownSumsAreNotWorkedOut(t *testing.T) {
	right := sha256.Sum256([]byte("xvmstate"))
	for name, tc := range map[string]struct {
		sum  string
		good bool
	}{"right": {hex.EncodeToString(right[:]), true}, "wrong": {"00", false}} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "gen-1")
			s, err := draft(t, dir, "x").Publish(Manifest{}, map[string]Sum{"vmstate": {SHA256: tc.sum}})
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Verify(); (err == nil) != tc.good || err != nil && !errors.Is(err, ErrCorrupt) {
				t.Errorf("verify: %v", err)
			}
		})
	}
}

// Check reads what was written to since the snapshot was published, and nothing else.
func TestCheckReadsWhatWasTouched(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "gen-1")
	s := publish(t, dir, "content")
	if err := s.Check(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "mem.diff")
	if err := flip(path); err != nil {
		t.Fatal(err)
	}
	var part *PartError
	if err := s.Check(); !errors.As(err, &part) || part.Part != "mem.diff" {
		t.Errorf("a flipped bit: %v", err)
	}
	if err := s.Check("vmstate"); err != nil {
		t.Errorf("the other file: %v", err)
	}
	// What hides its traces is found by reading everything only.
	if err := os.Chtimes(path, time.Time{}, Untouched); err != nil {
		t.Fatal(err)
	}
	if err := s.Check(); err != nil {
		t.Errorf("check read a file that looks untouched: %v", err)
	}
	if err := s.Verify(); !errors.Is(err, ErrCorrupt) {
		t.Errorf("verify: %v", err)
	}
}

func TestManifestOfVersion1HasOneMemoryLayer(t *testing.T) {
	raw, err := encodeManifest(Manifest{Version: 1, Files: []File{{Name: "mem.diff", Sum: Sum{CRC32C: "00000000"}}}})
	if err != nil {
		t.Fatal(err)
	}
	m, err := decodeManifest(raw)
	if err != nil || len(m.Memory) != 1 || m.Memory[0] != "mem.diff" {
		t.Errorf("%+v, %v", m, err)
	}
	for name, bad := range map[string]Manifest{
		"memory that is no file": {Version: 2, Memory: []string{"mem.1"}},
		"base that is no file":   {Version: 2, Base: "base"},
		"no sum":                 {Version: 2, Files: []File{{Name: "x"}}},
		"two sums":               {Version: 2, Files: []File{{Name: "x", Sum: Sum{CRC32C: "0", SHA256: "0"}}}},
	} {
		raw, err := encodeManifest(bad)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := decodeManifest(raw); err == nil {
			t.Errorf("%s was taken", name)
		}
	}
}
