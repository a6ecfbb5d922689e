package hostvm

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/cavaliergopher/cpio"
)

// Names inside the emulated host; init/ has the same.
const (
	guestBin     = "/usr/lib/torpor/bin"
	guestModules = "/etc/hostvm/modules"
	guestConfig  = "/etc/hostvm/config.json"
	guestData    = "/var/lib/torpor"
	initBinary   = "torpor-hostvm-init" // in the directory of binaries
)

// guestSettings is what init reads from guestConfig.
type guestSettings struct {
	Hostname string            `json:"hostname"`
	Listen   string            `json:"listen"`
	Token    string            `json:"token"`
	Disks    map[string]string `json:"disks"`
}

// initrdSpec says what goes into the initial file system, which is also the root the machine keeps.
type initrdSpec struct {
	modules  []string // files, in the order of loading
	busybox  string   // static, from the package busybox-static
	bin      string   // directory of the project's binaries, init among them
	binaries []string // names in bin that go to guestBin
	settings guestSettings
}

// writeInitrd writes the initial file system as a cpio archive. It is made anew at each start: copying the binaries once
// is quicker than finding out whether they changed.
func writeInitrd(ctx context.Context, name string, s initrdSpec) (err error) {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600) // it holds the token
	if err != nil {
		return err
	}
	defer func() {
		if cerr := f.Close(); err == nil {
			err = cerr
		}
	}()
	a := newArchive(f)
	a.dir("/etc/hostvm", "/bin", "/root", "/var/log", "/var/tmp", "/usr/bin", "/usr/sbin", "/sbin", "/lib/modules")
	a.file("/init", filepath.Join(s.bin, initBinary), 0o755)
	addBusybox(ctx, a, s.busybox)
	addModules(a, s.modules)
	for _, b := range s.binaries {
		a.file(path.Join(guestBin, b), filepath.Join(s.bin, b), 0o755)
	}
	settings, err := json.Marshal(s.settings)
	if err != nil {
		return err
	}
	a.text(guestConfig, string(settings), 0o600)
	a.text("/etc/hosts", "127.0.0.1 localhost\n::1 localhost\n10.0.2.15 "+s.settings.Hostname+"\n", 0o644)
	a.text("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\n", 0o644)
	a.text("/etc/group", "root:x:0:\ntty:x:5:\nkvm:x:100:\n", 0o644)
	return a.close()
}

func addBusybox(ctx context.Context, a *archive, busybox string) {
	a.file("/bin/busybox", busybox, 0o755)
	applets, err := output(ctx, "", busybox, "--list")
	if err != nil {
		a.fail(err)
		return
	}
	for name := range strings.FieldsSeq(applets) {
		if name != "busybox" {
			a.symlink(path.Join("/bin", name), "busybox")
		}
	}
}

func addModules(a *archive, files []string) {
	var list strings.Builder
	for _, f := range files {
		inside := path.Join("/lib/modules", filepath.Base(f))
		a.file(inside, f, 0o644)
		list.WriteString(inside + "\n")
	}
	a.text(guestModules, list.String(), 0o644)
}

// archive writes a cpio archive. The first error sticks and comes out of close, so that callers need not look at each.
type archive struct {
	w    *cpio.Writer
	seen map[string]bool
	err  error
}

func newArchive(w io.Writer) *archive {
	return &archive{w: cpio.NewWriter(w), seen: map[string]bool{"/": true}}
}

func (a *archive) fail(err error) {
	if a.err == nil {
		a.err = err
	}
}

// header writes the entry's header, and the directories above it that are not there yet.
func (a *archive) header(h *cpio.Header) {
	if parent := path.Dir(h.Name); !a.seen[parent] {
		a.dir(parent)
	}
	if a.err != nil {
		return
	}
	h.Name = strings.TrimPrefix(h.Name, "/")
	if err := a.w.WriteHeader(h); err != nil {
		a.fail(fmt.Errorf("initial file system: %s: %w", h.Name, err))
	}
}

func (a *archive) dir(names ...string) {
	for _, n := range names {
		if !a.seen[n] {
			a.seen[n] = true
			a.header(&cpio.Header{Name: n, Mode: cpio.TypeDir | 0o755, Links: 2})
		}
	}
}

func (a *archive) symlink(name, target string) {
	a.header(&cpio.Header{Name: name, Size: int64(len(target)), Mode: cpio.TypeSymlink | 0o777, Links: 1})
	a.copy(name, strings.NewReader(target)) // the content of a link is where it leads
}

func (a *archive) text(name, content string, mode cpio.FileMode) {
	a.header(&cpio.Header{Name: name, Size: int64(len(content)), Mode: cpio.TypeReg | mode, Links: 1})
	a.copy(name, strings.NewReader(content))
}

func (a *archive) file(name, from string, mode cpio.FileMode) {
	f, err := os.Open(from)
	if err != nil {
		a.fail(err)
		return
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		a.fail(err)
		return
	}
	a.header(&cpio.Header{Name: name, Size: st.Size(), Mode: cpio.TypeReg | mode, Links: 1})
	a.copy(name, f)
}

func (a *archive) copy(name string, r io.Reader) {
	if a.err != nil {
		return
	}
	if _, err := io.Copy(a.w, r); err != nil {
		a.fail(fmt.Errorf("initial file system: %s: %w", name, err))
	}
}

func (a *archive) close() error {
	if a.err != nil {
		return a.err
	}
	return a.w.Close()
}
