package build

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rs/zerolog"

	"torpor/images/base"
	"torpor/images/cache"
	"torpor/images/imageset"
	"torpor/images/kernel"
)

func TestAssemble(t *testing.T) {
	store, k, root := parts(t)
	envd := testProgram(t)
	first, err := assemble(zerolog.Nop(), store, k, root, envd)
	if err != nil {
		t.Fatal(err)
	}
	m, err := imageset.Verify(first)
	if err != nil {
		t.Fatal(err)
	}
	if m.Name != "base" || m.Kernel != "6.1.0-1" || m.EnvdVersion != EnvdVersion || m.Cmdline != cmdline {
		t.Errorf("manifest %+v", m)
	}
	if filepath.Base(first) != "images-"+m.ShortDigest() {
		t.Errorf("%s has digest %s", first, m.Digest)
	}
	again, err := assemble(zerolog.Nop(), store, k, root, envd)
	if err != nil || again != first {
		t.Errorf("the second run gave %s, %v; the first %s", again, err, first)
	}

	// Another envd is another set; the root file system is still the same file.
	must(t, os.WriteFile(envd, append(read(t, envd), 0), 0o755))
	other, err := assemble(zerolog.Nop(), store, k, root, envd)
	if err != nil || other == first {
		t.Fatalf("another envd gave %s, %v", other, err)
	}
	a, err := os.Stat(filepath.Join(first, rootfsName))
	must(t, err)
	b, err := os.Stat(filepath.Join(other, rootfsName))
	must(t, err)
	if !os.SameFile(a, b) {
		t.Error("the root file system was copied")
	}
}

func TestBuildRefusesAWrongEnvdAtOnce(t *testing.T) {
	dir := t.TempDir()
	script := filepath.Join(dir, "envd")
	must(t, os.WriteFile(script, []byte("#!/bin/sh\n"), 0o755))
	for path, want := range map[string]string{script: "cannot be the guest's init", filepath.Join(dir, "none"): "build it first"} {
		_, err := Build(t.Context(), zerolog.Nop(), Options{Cache: filepath.Join(dir, "cache"), Envd: path})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %q", path, err, want)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "cache")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a refused build made its cache: %v", err)
	}
}

// parts is a cache with a kernel and a root file system that have everything but content.
func parts(t *testing.T) (*cache.Store, kernel.Package, base.RootFS) {
	t.Helper()
	store, err := cache.Open(t.TempDir())
	must(t, err)
	k := kernel.Package{Dir: store.Path("kernel-6.1.0-1"), Version: "6.1.0-1", Release: "6.1.0-cloud"}
	must(t, os.MkdirAll(filepath.Join(k.ModulesDir(), "kernel"), 0o755))
	// All that the guest needs counts as built in.
	must(t, os.WriteFile(filepath.Join(k.ModulesDir(), "modules.builtin"), []byte(strings.Join(modules, "\n")), 0o644))
	must(t, os.WriteFile(k.Vmlinux(), []byte("kernel"), 0o444))

	root := base.RootFS{Path: filepath.Join(store.Root(), "rootfs"), Bytes: 6}
	must(t, os.WriteFile(root.Path, []byte("rootfs"), 0o444))
	root.Digest, err = imageset.HashFile(root.Path)
	must(t, err)
	return store, k, root
}

// testProgram is the header of a static x86-64 program.
func testProgram(t *testing.T) string {
	t.Helper()
	b := make([]byte, 64)
	copy(b, "\x7fELF\x02\x01\x01")
	b[16], b[18], b[20], b[52], b[54] = 2, 62, 1, 64, 56
	path := filepath.Join(t.TempDir(), "envd")
	must(t, os.WriteFile(path, b, 0o755))
	return path
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	must(t, err)
	return b
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
