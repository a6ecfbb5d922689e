package kernel

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/rs/zerolog"

	"torpor/images/cache"
)

// Another program that shares the cache may have unpacked a kernel without taking vmlinux out of it.
func TestEnsureCompletesWhatIsThere(t *testing.T) {
	store, err := cache.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	const name = "kernel-6.1.0-1"
	write(t, filepath.Join(store.Path(name), "vmlinuz"), testBzImage(t, testELF(50)))
	write(t, filepath.Join(store.Path(name), "lib/modules/6.1.0-cloud/modules.builtin"), nil)
	if err := store.Point(alias, name); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		p, err := Ensure(t.Context(), zerolog.Nop(), store, false)
		if err != nil {
			t.Fatal(err)
		}
		if p.Version != "6.1.0-1" || p.Release != "6.1.0-cloud" {
			t.Errorf("version %q, release %q", p.Version, p.Release)
		}
		got, err := os.ReadFile(p.Vmlinux())
		if err != nil || !bytes.Equal(got, testELF(50)) {
			t.Errorf("vmlinux has %d bytes, %v", len(got), err)
		}
	}
	left, err := filepath.Glob(filepath.Join(store.Path(name), ".vmlinux-*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}
