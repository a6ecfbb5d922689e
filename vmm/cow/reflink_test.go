package cow_test

import (
	"bytes"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"torpor/vmm/cow"
)

// mountNew mounts a new file system of the kind in a directory.
func mountNew(t *testing.T, kind string) string {
	t.Helper()
	mkfs, err := exec.LookPath("mkfs." + kind)
	if err != nil || os.Geteuid() != 0 {
		t.Skipf("needs root and mkfs.%s", kind)
	}
	dir := t.TempDir()
	image := filepath.Join(dir, "image")
	check(t, os.WriteFile(image, nil, 0o600))
	check(t, os.Truncate(image, 512<<20))
	if out, err := exec.Command(mkfs, "-q", image).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	at := filepath.Join(dir, "mnt")
	check(t, os.Mkdir(at, 0o700))
	if out, err := exec.Command("mount", "-o", "loop", image, at).CombinedOutput(); err != nil {
		t.Skipf("this kernel cannot mount %s from a file: %s", kind, out)
	}
	t.Cleanup(func() { check(t, unix.Unmount(at, unix.MNT_DETACH)) })
	return at
}

// Where the file system has reflinks a merged layer shares the room of the old ones; everywhere it has the same bytes.
func TestMergeSharesRoom(t *testing.T) {
	const size, stored = 64 << 20, 32 << 20
	for kind, shares := range map[string]bool{"btrfs": true, "xfs": true, "ext4": false} {
		t.Run(kind, func(t *testing.T) {
			dir := mountNew(t, kind)
			rng := rand.New(rand.NewPCG(1, 5))
			var layers []string
			want := make([]byte, size)
			for i, name := range []string{"a", "b"} {
				path := filepath.Join(dir, name)
				check(t, cow.Create(path, size))
				c, err := cow.OpenChain("", nil, path)
				check(t, err)
				at := int64(i) * stored / 2
				p := fill(rng, stored)
				copy(want[at:], p)
				_, err = c.WriteAt(p, at)
				check(t, err)
				check(t, c.Flush())
				check(t, c.Close())
				layers = append(layers, path)
			}
			before := freeBytes(t, dir)
			merged := filepath.Join(dir, "merged")
			check(t, cow.Merge(merged, layers...))
			check(t, cow.Verify(merged))
			took := before - freeBytes(t, dir)
			t.Logf("a merged layer of %d MiB took %d KiB", stored*3/2>>20, took>>10)
			if shared := took < stored/8; shared != shares {
				t.Errorf("it took %d bytes", took)
			}
			if got := contents(t, open(t, "", []string{merged}, "")); !bytes.Equal(got, want) {
				t.Error("other bytes")
			}
		})
	}
}

func freeBytes(t *testing.T, dir string) int64 {
	t.Helper()
	d, err := os.Open(dir)
	check(t, err)
	defer d.Close()
	check(t, unix.Syncfs(int(d.Fd())))
	var st unix.Statfs_t
	check(t, unix.Statfs(dir, &st))
	return int64(st.Bfree) * st.Bsize
}
