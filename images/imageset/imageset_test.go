package imageset

import (
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

func TestRoundTrip(t *testing.T) {
	dir, m := newSet(t)
	got, err := Verify(dir)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, m) {
		t.Errorf("%+v, want %+v", got, m)
	}
	if len(m.ShortDigest()) != 12 || !strings.HasPrefix(m.Digest, "sha256:"+m.ShortDigest()) {
		t.Errorf("short digest %q of %q", m.ShortDigest(), m.Digest)
	}
}

func TestDigestCoversEverything(t *testing.T) {
	_, m := newSet(t)
	changes := map[string]func(*Manifest){
		"name":        func(m *Manifest) { m.Name += "x" },
		"kernel":      func(m *Manifest) { m.Kernel += "x" },
		"cmdline":     func(m *Manifest) { m.Cmdline += "x" },
		"envdVersion": func(m *Manifest) { m.EnvdVersion += "x" },
		"diskBytes":   func(m *Manifest) { m.DiskBytes++ },
		"vmlinux":     func(m *Manifest) { m.Vmlinux += "x" },
		"part":        func(m *Manifest) { m.Parts["envd"] += "x" },
	}
	for name, change := range changes {
		other := m
		other.Parts = maps.Clone(m.Parts)
		change(&other)
		if err := other.Seal(); err != nil {
			t.Fatal(err)
		}
		if other.Digest == m.Digest {
			t.Errorf("a change of %s does not change the digest", name)
		}
	}
}

func TestVerifyFindsDamage(t *testing.T) {
	for _, part := range []string{"vmlinux", "initrd", "rootfs.ext4"} {
		dir, _ := newSet(t)
		path := filepath.Join(dir, part)
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		b[0] ^= 1
		if err := os.WriteFile(path, b, 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := Verify(dir); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), part) {
			t.Errorf("a flipped bit in %s: %v", part, err)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		if _, err := Verify(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("no %s: %v", part, err)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	_, good := newSet(t)
	tests := []struct {
		name   string
		change func(*Manifest)
		reseal bool
		errHas string
	}{
		{"other digest", func(m *Manifest) { m.Digest = "sha256:00" }, false, "says digest"},
		{"changed after sealing", func(m *Manifest) { m.Cmdline = "init=/bin/sh" }, false, "says digest"},
		{"a path", func(m *Manifest) { m.Initrd = "../../etc/passwd" }, true, "is no file name"},
		{"no name", func(m *Manifest) { m.RootFS = "" }, true, "is no file name"},
		{"no part", func(m *Manifest) { m.Parts = nil }, true, "no digest for"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := good
			tt.change(&m)
			if tt.reseal {
				if err := m.Seal(); err != nil {
					t.Fatal(err)
				}
			}
			b, err := json.Marshal(m)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := Parse(b); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), tt.errHas) {
				t.Errorf("error %v, want ErrDamaged with %q", err, tt.errHas)
			}
		})
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(`{}`))
	f.Add([]byte(`{"name":"base","digest":"sha256:00","parts":{"vmlinux":"sha256:00"}}`))
	f.Add([]byte(`[`))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := Parse(b)
		if err != nil {
			if !errors.Is(err, ErrDamaged) {
				t.Fatalf("error %v does not wrap ErrDamaged", err)
			}
			return
		}
		for _, name := range m.Files() {
			if strings.ContainsRune(name, '/') {
				t.Fatalf("took the path %q", name)
			}
		}
	})
}

func newSet(t *testing.T) (string, Manifest) {
	t.Helper()
	dir := t.TempDir()
	m := Manifest{
		Name: "base", Kernel: "6.1.0-1", Cmdline: "quiet", EnvdVersion: "0.6.13", DiskBytes: int64(len("rootfs.ext4")),
		Vmlinux: "vmlinux", Initrd: "initrd", RootFS: "rootfs.ext4", Parts: map[string]string{"envd": "sha256:11"},
	}
	for _, name := range m.Files() {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(name), 0o644); err != nil {
			t.Fatal(err)
		}
		digest, err := HashFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		m.Parts[name] = digest
	}
	if err := m.Seal(); err != nil {
		t.Fatal(err)
	}
	if err := m.Write(dir); err != nil {
		t.Fatal(err)
	}
	return dir, m
}
