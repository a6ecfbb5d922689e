package base

import (
	"cmp"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"torpor/images/cache"
	"torpor/images/command"
)

// TestBuiltRootFS looks into the root file system that the current recipe gave on this machine, if it was built here.
func TestBuiltRootFS(t *testing.T) {
	needTools(t)
	home, err := os.UserHomeDir()
	if err != nil {
		t.Skip("no home directory, so no cache")
	}
	dir := cmp.Or(os.Getenv("TORPOR_CACHE"), filepath.Join(home, ".cache/torpor"))
	if _, err := os.Stat(dir); err != nil {
		t.Skipf("no cache at %s: run torpor-images build", dir)
	}
	store, err := cache.Open(dir)
	must(t, err)
	name, ok := store.Follow("rootfs-recipe-" + recipeHash())
	if !ok {
		t.Skip("the current recipe was not built here: run torpor-images build")
	}
	r, err := open(store, name)
	must(t, err)
	checkRootFS(t, r)
}

func checkRootFS(t *testing.T, r RootFS) {
	t.Helper()
	if r.Bytes != disk.Bytes {
		t.Errorf("%s has %d bytes, want %d", r.Path, r.Bytes, disk.Bytes)
	}
	if _, err := command.Run(t.Context(), command.Command{Name: "e2fsck", Args: []string{"-f", "-n", r.Path}}); err != nil {
		t.Error(err)
	}
	wants := map[string]string{ // path -> what debugfs says of it
		"/usr/bin/bash":                      "Type: regular",
		"/usr/bin/curl":                      "Type: regular",
		"/usr/bin/git":                       "Type: regular",
		"/usr/lib/git-core/git-daemon":       "Type: regular",
		"/usr/bin/ls":                        "Type: regular",
		"/usr/bin/pgrep":                     "Type: regular",
		"/usr/bin/python":                    `Fast link dest: "python3"`,
		"/usr/bin/python3":                   `Fast link dest: "python3.11"`,
		"/usr/bin/sqlite3":                   "Type: regular",
		"/usr/bin/ss":                        "Type: regular",
		"/usr/bin/sudo":                      "04755",
		"/usr/bin/tput":                      "Type: regular",
		"/usr/lib/terminfo/x/xterm-256color": "Type: regular",
		"/etc/ssl/certs/ca-certificates.crt": "Type: regular",
		"/etc/sudoers.d/user":                "0440",
		"/etc/machine-id":                    "Size: 0",
		"/etc/apt/sources.list":              "Size: 0",
		"/home/user":                         "User:  1000   Group:  1000",
		"/home/user/.bashrc":                 "User:  1000   Group:  1000",
		"/home/user/.profile":                "User:  1000   Group:  1000",
		"/tmp":                               "01777",
		"/root":                              "0700",
	}
	for _, dir := range []string{"/dev", "/proc", "/run", "/sys", "/var/log"} {
		wants[dir] = "Type: directory"
	}
	for path, want := range wants {
		if got := debugfs(t, r.Path, "stat "+path); !strings.Contains(got, want) {
			t.Errorf("%s has no %q: %s", path, want, got)
		}
	}
	if passwd := debugfs(t, r.Path, "cat /etc/passwd"); !strings.Contains(passwd, "\nuser:x:1000:1000::/home/user:/bin/bash\n") {
		t.Errorf("no user in /etc/passwd:\n%s", passwd)
	}
	for _, dir := range []string{"/run", "/etc/apt/sources.list.d"} {
		if got := debugfs(t, r.Path, "ls -p "+dir); strings.Count(got, "\n") > 3 {
			t.Errorf("%s is not empty: %s", dir, got)
		}
	}
	if got := debugfs(t, r.Path, "ls -p /etc/ssh"); strings.Contains(got, "host_") {
		t.Errorf("host keys: %s", got)
	}
}
