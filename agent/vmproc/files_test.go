package vmproc

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"torpor/api/apierr"
	"torpor/api/fdpass"
	"torpor/api/vmmpb"
)

// dirOf makes files that contain their names.
func dirOf(t *testing.T, names ...string) func(string) string {
	t.Helper()
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	for _, name := range names {
		if err := os.WriteFile(in(name), []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return in
}

func TestBootHandsFilesOver(t *testing.T) {
	p := start(t, supervisor(t), "i1")
	in := dirOf(t, "kernel", "initrd", "base", "layer1", "layer2", "top")
	req := &vmmpb.BootRequest{
		Kernel: in("kernel"), Initrd: in("initrd"),
		Machine: &vmmpb.Machine{
			Disks:   []*vmmpb.Disk{{Base: in("base"), Layers: []string{in("layer1"), in("layer2")}, Top: in("top")}},
			Console: &vmmpb.Console{Enabled: true, Log: in("console")},
		},
	}
	given := proto.CloneOf(req)
	for range 2 { // the names are free again
		_, err := p.Boot(bounded(t), req)
		if !errors.Is(err, &apierr.Error{Code: apierr.Busy}) || err.Error() != "kernel initrd base top! layer1 layer2 !" {
			t.Errorf("the VMM got %v", err)
		}
	}
	if !proto.Equal(req, given) {
		t.Error("the caller's request was changed")
	}
	if err := os.Remove(in("layer2")); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Boot(bounded(t), req); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), in("layer2")) {
		t.Errorf("a file that is missing: %v", err)
	}
}

// A tap is opened by whoever makes taps, and handed over like a file.
func TestBootHandsTapsOver(t *testing.T) {
	s := supervisor(t)
	in := dirOf(t, "kernel", "tap0", "tap1")
	req := &vmmpb.BootRequest{Kernel: in("kernel"), Machine: &vmmpb.Machine{
		Nets: []*vmmpb.Net{{Tap: "tap0"}, {Tap: "tap1"}}, Console: &vmmpb.Console{Enabled: true, Log: in("console")},
	}}
	if _, err := start(t, s, "i0").Boot(bounded(t), req); err == nil || !strings.Contains(err.Error(), "tap0") {
		t.Errorf("without taps: %v", err)
	}
	var opened []*os.File
	s.OpenTap = func(name string) (*os.File, error) {
		f, err := os.Open(in(name))
		opened = append(opened, f)
		return f, err
	}
	p := start(t, s, "i1")
	req.Initrd = in("kernel") // the stand-in reads every file
	if _, err := p.Boot(bounded(t), req); err == nil || err.Error() != "kernel kernel tap0 tap1 !" {
		t.Errorf("the VMM got %v", err)
	}
	for _, f := range opened {
		if err := f.Close(); !errors.Is(err, os.ErrClosed) {
			t.Errorf("%s was left open", f.Name())
		}
	}
	if err := os.Remove(in("tap1")); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Boot(bounded(t), req); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a tap that cannot be opened: %v", err)
	}
}

// What a call does not take is closed in the VMM: any number of calls fit through an inbox of 64 files.
func TestFilesNobodyTakesGoAway(t *testing.T) {
	p := start(t, supervisor(t), "i1")
	in := dirOf(t, "state", "base", "diff")
	for range fdpass.MaxHeld {
		if _, err := p.Restore(bounded(t), &vmmpb.RestoreRequest{State: in("state"), BaseMemory: in("base"), MemoryLayers: []string{in("diff")}}); err != nil {
			t.Fatal(err)
		}
	}
}

func TestSaveMakesItsFiles(t *testing.T) {
	p := start(t, supervisor(t), "i1")
	in := dirOf(t, "there")
	const full = vmmpb.SaveKind_SAVE_KIND_FULL
	if _, err := p.Save(bounded(t), &vmmpb.SaveRequest{Kind: full, State: in("state"), Memory: in("memory")}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"state", "memory"} {
		if text, err := os.ReadFile(in(name)); err != nil || string(text) != "saved" {
			t.Errorf("%s: %q, %v", name, text, err)
		}
	}
	if _, err := p.Save(bounded(t), &vmmpb.SaveRequest{Kind: full, State: in("a"), Memory: in("there")}); !errors.Is(err, os.ErrExist) {
		t.Errorf("over a file: %v", err)
	}
	if _, err := p.Save(bounded(t), &vmmpb.SaveRequest{State: in("b"), Memory: in("c")}); !errors.Is(err, &apierr.Error{Code: apierr.DiskFull}) {
		t.Errorf("a save that fails: %v", err)
	}
	for _, name := range []string{"a", "b", "c"} {
		if _, err := os.Stat(in(name)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("a failed save left %s (%v)", name, err)
		}
	}
	if text, err := os.ReadFile(in("there")); err != nil || string(text) != "there" {
		t.Errorf("a file that was there: %q, %v", text, err)
	}
}

func TestCheckpointMakesItsFilesAndWritesTops(t *testing.T) {
	p := start(t, supervisor(t), "i1")
	in := dirOf(t, "top1", "top2")
	r := &vmmpb.CheckpointRequest{Kind: vmmpb.SaveKind_SAVE_KIND_DIFF, State: in("state"), Memory: in("memory"), Tops: []string{in("top1"), in("top2")}}
	if _, err := p.Checkpoint(bounded(t), r); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"state", "memory"} {
		if text, err := os.ReadFile(in(name)); err != nil || string(text) != "saved" {
			t.Errorf("%s: %q, %v", name, text, err)
		}
	}
	for _, name := range []string{"top1", "top2"} {
		if text, err := os.ReadFile(in(name)); err != nil || !strings.HasPrefix(string(text), "saved") {
			t.Errorf("%s: %q, %v", name, text, err)
		}
	}
	r.Kind, r.State, r.Memory = vmmpb.SaveKind_SAVE_KIND_UNSPECIFIED, in("a"), in("b")
	if _, err := p.Checkpoint(bounded(t), r); !errors.Is(err, &apierr.Error{Code: apierr.DiskFull}) {
		t.Errorf("a checkpoint that fails: %v", err)
	}
	for name, there := range map[string]bool{"a": false, "b": false, "top1": true, "top2": true} {
		if _, err := os.Stat(in(name)); (err == nil) != there {
			t.Errorf("after a failed checkpoint: %s: %v", name, err)
		}
	}
}

func TestFileNames(t *testing.T) {
	for _, path := range []string{"/a/b", "/", "", "/x/\x00 \n\u00e4", "/" + strings.Repeat("long", 100)} {
		if name := fileName(1<<63, path); len(name) < 1 || len(name) > fdpass.MaxName || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r > '~' }) {
			t.Errorf("%q becomes %q", path, name)
		}
	}
}
