package base

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"torpor/images/command"
	"torpor/images/imageset"
)

// small is the guest's layout, but quick.
func small() Layout {
	l := disk
	l.Bytes, l.Inodes, l.JournalMiB = 64<<20, 1024, 4
	return l
}

// TestImageDoesNotDependOnHistory makes the same tree twice, its files in opposite order and at other times.
func TestImageDoesNotDependOnHistory(t *testing.T) {
	needTools(t)
	shipped := time.Unix(1700000000, 0)
	var digests []string
	for _, backwards := range []bool{false, true} {
		tree := testTree(t, backwards)
		started := time.Now()
		if err := os.Chtimes(filepath.Join(tree, "etc/motd"), shipped, shipped); err != nil {
			t.Fatal(err)
		}
		made := started.Add(time.Hour) // by the build
		if err := os.Chtimes(filepath.Join(tree, "etc/made"), made, made); err != nil {
			t.Fatal(err)
		}
		image := filepath.Join(t.TempDir(), "image")
		if err := small().write(t.Context(), image, tree, started.Add(-time.Hour)); err != nil {
			t.Fatal(err)
		}
		digest, err := imageset.HashFile(image)
		if err != nil {
			t.Fatal(err)
		}
		digests = append(digests, digest)
		checkContent(t, image)
	}
	if digests[0] != digests[1] {
		t.Errorf("digests %s and %s differ", digests[0], digests[1])
	}
}

func checkContent(t *testing.T, image string) {
	t.Helper()
	motd := debugfs(t, image, "cat /etc/motd")
	if motd != "hello\n" {
		t.Errorf("/etc/motd is %q", motd)
	}
	if got, want := debugfs(t, image, `cat "/etc/with a space"`), "x"; got != want {
		t.Errorf("a name with a space holds %q", got)
	}
	for path, wants := range map[string][]string{
		"/etc/motd":  {`Mode:\s+0640`, `mtime: 0x6553f100`, `ctime: 0x67748580`, `crtime: 0x67748580`, `Links: 2`},
		"/etc/twin":  {`Links: 2`},
		"/etc/made":  {`mtime: 0x67748580`},
		"/etc/empty": {`Size: 0`},
		"/tmp":       {`Type: directory`, `Mode:\s+01777`},
		"/link":      {`Type: symlink`, `Fast link dest: "etc/motd"`},
		"/bin/su":    {`Mode:\s+04755`},
		"/dev":       {`Type: directory`, `Links: 2`},
	} {
		got := debugfs(t, image, "stat "+path)
		for _, want := range wants {
			if !regexp.MustCompile(want).MatchString(got) {
				t.Errorf("%s has no %s:\n%s", path, want, got)
			}
		}
	}
	if got := debugfs(t, image, "ls -p /dev"); strings.Contains(got, "ttyX") {
		t.Errorf("what was in /dev went along: %s", got)
	}
}

// testTree is a tree with one of each kind of file.
func testTree(t *testing.T, backwards bool) string {
	t.Helper()
	tree := t.TempDir()
	for _, dir := range []string{"etc", "tmp", "bin", "dev"} {
		must(t, os.Mkdir(filepath.Join(tree, dir), 0o755))
	}
	must(t, os.Chmod(filepath.Join(tree, "tmp"), os.ModeSticky|0o777))
	must(t, os.Chmod(tree, 0o755))
	files := []struct {
		name, content string
		mode          os.FileMode
	}{
		{"etc/motd", "hello\n", 0o640},
		{"etc/made", "made", 0o644},
		{"etc/empty", "", 0o644},
		{"etc/with a space", "x", 0o644},
		{"bin/su", strings.Repeat("su", 5000), os.ModeSetuid | 0o755},
		{"dev/ttyX", "", 0o644},
	}
	for i := range files {
		f := files[i]
		if backwards {
			f = files[len(files)-1-i]
		}
		path := filepath.Join(tree, f.name)
		must(t, os.WriteFile(path, []byte(f.content), 0o600))
		must(t, os.Chmod(path, f.mode))
	}
	must(t, os.Link(filepath.Join(tree, "etc/motd"), filepath.Join(tree, "etc/twin")))
	must(t, os.Symlink("etc/motd", filepath.Join(tree, "link")))
	must(t, os.Chtimes(filepath.Join(tree, "etc/motd"), time.Unix(1700000000, 0), time.Unix(1700000000, 0)))
	return tree
}

func TestPopulateReportsWhatDebugfsSays(t *testing.T) {
	needTools(t)
	image := filepath.Join(t.TempDir(), "image")
	l := small()
	must(t, l.format(t.Context(), image))
	err := l.populate(t.Context(), image, bytes.NewBufferString("write /no/such/file x\n"))
	if err == nil || !strings.Contains(err.Error(), "/no/such/file") {
		t.Errorf("error %v, want one that names the file", err)
	}
}

func TestScriptRefusesNames(t *testing.T) {
	for _, name := range []string{"a\"b", "a\nb"} {
		var b bytes.Buffer
		err := writeScript(&b, "/tree", []file{{rel: name, mode: 0o100644}}, 1)
		if err == nil {
			t.Errorf("took the name %q: %q", name, b.String())
		}
	}
}

func TestScriptRefusesDevices(t *testing.T) {
	if err := writeScript(&bytes.Buffer{}, "/tree", []file{{rel: "etc/null", mode: 0o020666}}, 1); err == nil {
		t.Error("took a device node")
	}
}

func TestKeysChangeWithTheirInputs(t *testing.T) {
	recipe := recipeHash()
	if recipe != recipeHash() {
		t.Error("the recipe's hash is not stable")
	}
	keys := map[string]string{}
	for _, versions := range [][]string{nil, {"bash 1"}, {"bash 2"}, {"bash 2", "curl 1"}} {
		key := rootfsKey(recipe, versions)
		if other, ok := keys[key]; ok {
			t.Errorf("%q and %s share the key %s", versions, other, key)
		}
		keys[key] = fmt.Sprintf("%q", versions)
	}
}

func debugfs(t *testing.T, image, request string) string {
	t.Helper()
	out, err := command.Run(t.Context(), command.Command{Name: "debugfs", Args: []string{"-R", request, image}})
	if err != nil {
		t.Fatal(err)
	}
	return string(out.Stdout)
}

func needTools(t *testing.T) {
	t.Helper()
	for _, tool := range []string{"mke2fs", "debugfs", "e2fsck"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("%s is not installed: apt-get install e2fsprogs", tool)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
