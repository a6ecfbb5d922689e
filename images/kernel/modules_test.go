package kernel

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestClosureOfFiles(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "modules.builtin"), []byte("kernel/fs/ext4/ext4.ko\nkernel/drivers/char/hw_random/rng-core.ko\n"))
	for path, needs := range map[string]string{
		"drivers/virtio/virtio_ring.ko":            "",
		"drivers/virtio/virtio.ko":                 "virtio_ring",
		"drivers/block/virtio_blk.ko":              "virtio,virtio_ring",
		"drivers/char/hw_random/virtio-rng.ko":     "virtio_ring,virtio,rng-core",
		"net/broken.ko":                            "nowhere",
		"drivers/virtio/not-a-module.ko.something": "",
	} {
		write(t, filepath.Join(dir, "kernel", path), testModule(needs))
	}
	m, err := OpenModules(dir)
	if err != nil {
		t.Fatal(err)
	}
	got, err := m.Closure("virtio_blk", "virtio_rng", "ext4")
	if err != nil {
		t.Fatal(err)
	}
	for i := range got {
		got[i] = filepath.Base(got[i])
	}
	if want := []string{"virtio_ring.ko", "virtio.ko", "virtio_blk.ko", "virtio-rng.ko"}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	for name, want := range map[string]string{"broken": "no module nowhere", "not_a_module": "no module not_a_module"} {
		if _, err := m.Closure(name); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %q", name, err, want)
		}
	}
}

func TestClosureRefusesCircles(t *testing.T) {
	needs := map[string][]string{"a": {"b"}, "b": {"c"}, "c": {"a"}}
	_, err := closure([]string{"a"}, func(name string) (string, []string, error) { return name, needs[name], nil })
	if err == nil || !strings.Contains(err.Error(), "needs itself") {
		t.Errorf("error %v, want that a module needs itself", err)
	}
}

// FuzzClosure reads "a:b,c;b:c" as needs, and checks the order against them.
func FuzzClosure(f *testing.F) {
	f.Add("a:b,c;b:c")
	f.Add("a:a")
	f.Add("a:b;b:a")
	f.Add("x-y:z;x_y:w;;:,")
	f.Fuzz(func(t *testing.T, text string) {
		needs, names := map[string][]string{}, []string{}
		for entry := range strings.SplitSeq(text, ";") {
			name, list, _ := strings.Cut(entry, ":")
			name = ModuleName(name)
			names = append(names, name)
			needs[name] = parseDepends([]byte("license=GPL\x00depends=" + list + "\x00"))
		}
		order, err := closure(names, func(name string) (string, []string, error) { return "/" + name, needs[name], nil })
		if err != nil {
			return
		}
		for i, path := range order {
			if slices.Contains(order[:i], path) {
				t.Fatalf("%q is there twice in %q", path, order)
			}
			for _, need := range needs[path[1:]] {
				if !slices.Contains(order[:i], "/"+ModuleName(need)) {
					t.Fatalf("%q comes before %q in %q", path, need, order)
				}
			}
		}
	})
}

func FuzzModuleNeeds(f *testing.F) {
	f.Add(testModule("a,b"))
	f.Add(testModule(""))
	f.Add([]byte("\x7fELF"))
	f.Fuzz(func(t *testing.T, ko []byte) {
		needs, err := moduleNeeds(ko)
		if err != nil && needs != nil {
			t.Fatalf("both %q and %v", needs, err)
		}
		if slices.Contains(needs, "") {
			t.Fatal("a need without a name")
		}
	})
}

func TestModuleNeeds(t *testing.T) {
	needs, err := moduleNeeds(testModule("virtio,virtio_ring"))
	if err != nil || !slices.Equal(needs, []string{"virtio", "virtio_ring"}) {
		t.Errorf("%q, %v", needs, err)
	}
	if _, err := moduleNeeds(testELF(0)); err == nil {
		t.Error("took a file without .modinfo")
	}
}

func TestParseShow(t *testing.T) {
	record := "Package: linux-image-cloud-amd64\nVersion: 6.1.192-3\nDepends: linux-image-6.1.0-57-cloud-amd64 (= 6.1.192-3)\n"
	image, version, err := parseShow(record)
	if err != nil || image != "linux-image-6.1.0-57-cloud-amd64" || version != "6.1.192-3" {
		t.Errorf("%q, %q, %v", image, version, err)
	}
	for _, bad := range []string{
		"", "Depends: something (= 1)\n", "Depends: linux-image-1\n", "Depends: linux-image-1 (= ../../x)\n", "Depends: linux-image-1 (= )\n",
	} {
		if _, _, err := parseShow(bad); err == nil {
			t.Errorf("took %q", bad)
		}
	}
}

// testModule is an ELF file with a .modinfo section as a module has it.
func testModule(depends string) []byte {
	const names = "\x00.modinfo\x00.shstrtab\x00"
	info := fmt.Sprintf("license=GPL\x00depends=%s\x00name=x\x00", depends)
	le := binary.LittleEndian
	b := make([]byte, 64)
	copy(b, "\x7fELF\x02\x01\x01")
	le.PutUint16(b[16:], 1)
	le.PutUint16(b[18:], 62)
	le.PutUint32(b[20:], 1)
	le.PutUint16(b[52:], 64)
	le.PutUint16(b[58:], 64) // size and number of section headers, and which holds the names
	le.PutUint16(b[60:], 3)
	le.PutUint16(b[62:], 2)
	infoAt := len(b)
	b = append(b, info...)
	namesAt := len(b)
	b = append(b, names...)
	le.PutUint64(b[40:], uint64(len(b)))
	section := func(name, kind uint32, at, size int) {
		s := make([]byte, 64)
		le.PutUint32(s, name)
		le.PutUint32(s[4:], kind)
		le.PutUint64(s[24:], uint64(at))
		le.PutUint64(s[32:], uint64(size))
		b = append(b, s...)
	}
	section(0, 0, 0, 0)
	section(1, 1, infoAt, len(info))
	section(10, 3, namesAt, len(names))
	return b
}

func write(t *testing.T, path string, content []byte) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, content, 0o644); err != nil {
		t.Fatal(err)
	}
}
