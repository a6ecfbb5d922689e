package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"torpor/vmm/cow"
	"torpor/vmm/snapshot"
)

func TestDiskInspect(t *testing.T) {
	layer := filepath.Join(t.TempDir(), "1.layer")
	if err := cow.Create(layer, 64<<20); err != nil {
		t.Fatal(err)
	}
	if got := runApp(t, nil, "", "disk", "inspect", layer); got.code != 0 || !strings.Contains(got.stdout, "disk of 64 MiB, 0 blocks stored") {
		t.Errorf("%+v", got)
	}
	raw, err := os.ReadFile(layer)
	if err != nil {
		t.Fatal(err)
	}
	raw[0] ^= 1
	if err := os.WriteFile(layer, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := runApp(t, nil, "", "disk", "inspect", layer); got.code != 1 || !strings.Contains(got.stderr, layer) {
		t.Errorf("a flipped bit passed: %+v", got)
	}
}

func TestDiskInspectVerify(t *testing.T) {
	dir := t.TempDir()
	layer := filepath.Join(dir, "1.layer")
	if err := cow.Create(layer, 64<<20); err != nil {
		t.Fatal(err)
	}
	c, err := cow.OpenChain("", nil, layer)
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.WriteAt([]byte("precious"), 0)
	if err := errors.Join(err, c.Flush(), c.Close(), cow.Seal(layer)); err != nil {
		t.Fatal(err)
	}
	if got := runApp(t, nil, "", "disk", "inspect", "--verify", layer); got.code != 0 || !strings.Contains(got.stdout, "1 blocks stored (0.0 MiB), 0 known to be zero, format 2, sealed") {
		t.Errorf("%+v", got)
	}
	raw, err := os.ReadFile(layer)
	if err != nil {
		t.Fatal(err)
	}
	raw[bytes.Index(raw, []byte("precious"))] ^= 1
	if err := os.WriteFile(layer, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := runApp(t, nil, "", "disk", "inspect", layer); got.code != 0 {
		t.Errorf("without --verify the data was read: %+v", got)
	}
	if got := runApp(t, nil, "", "disk", "inspect", "--verify", layer); got.code != 1 || !strings.Contains(got.stderr, "block 0") {
		t.Errorf("a flipped bit passed: %+v", got)
	}
}

func TestSnapshotOfNothing(t *testing.T) {
	for _, verb := range []string{"inspect", "verify"} {
		if got := runApp(t, nil, "", "snapshot", verb, t.TempDir()); got.code != 1 || !strings.Contains(got.stderr, "vmstate") {
			t.Errorf("%s: %+v", verb, got)
		}
	}
}

// layers writes two memory layers that lie upon each other, and returns their paths.
func layers(t *testing.T, dir string) (paths []string) {
	t.Helper()
	base := snapshot.Digest{1}
	parent := base
	for i := range uint64(2) {
		path := filepath.Join(dir, fmt.Sprintf("mem-%d", i+1))
		f, err := os.Create(path)
		if err != nil {
			t.Fatal(err)
		}
		b := snapshot.NewLayerBuilder(snapshot.LayerInfo{ID: snapshot.ID{byte(i)}, MemoryBytes: 1 << 20, Base: base, Parent: parent})
		data := bytes.Repeat([]byte{byte(i + 1)}, 2*snapshot.PageSize)
		if err := b.Add(snapshot.RunData, i+3, 2); err != nil {
			t.Fatal(err)
		}
		b.Runs[0].Sum = snapshot.Checksum(data)
		_, err = f.WriteAt(data, int64(b.Runs[0].Offset))
		info, ferr := b.Finish(f)
		if err := errors.Join(err, ferr, f.Close()); err != nil {
			t.Fatal(err)
		}
		parent = info.Name()
		paths = append(paths, path)
	}
	return paths
}

func TestLayersAreInspectedAndVerified(t *testing.T) {
	paths := layers(t, t.TempDir())
	if got := runApp(t, nil, "", "snapshot", "inspect", paths[1]); got.code != 0 || !strings.Contains(got.stdout, "2 pages stored (0.0 MiB) in 1 runs") || !strings.Contains(got.stdout, "parent") {
		t.Errorf("%+v", got)
	}
	if got := runApp(t, nil, "", "snapshot", "verify", paths[1]); got.code != 0 || !strings.Contains(got.stdout, "ok") {
		t.Errorf("%+v", got)
	}
	raw, err := os.ReadFile(paths[1])
	if err != nil {
		t.Fatal(err)
	}
	raw[snapshot.PageSize+17] ^= 1
	if err := os.WriteFile(paths[1], raw, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := runApp(t, nil, "", "snapshot", "verify", paths[1]); got.code != 1 || !strings.Contains(got.stderr, "pages 4-5") {
		t.Errorf("a flipped bit passed: %+v", got)
	}
	if err := os.WriteFile(paths[1], bytes.Repeat([]byte("something else "), 100), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := runApp(t, nil, "", "snapshot", "inspect", paths[1]); got.code != 1 || !strings.Contains(got.stderr, "not a memory layer") {
		t.Errorf("%+v", got)
	}
}

// A directory is a state and a chain: what does not fit together is told by its part.
func TestSnapshotDirectoryIsVerified(t *testing.T) {
	dir := t.TempDir()
	sums := []uint32{snapshot.ZeroSum(1 << 20)}
	base := snapshot.BaseDigest(1<<20, sums)
	f, err := os.Create(filepath.Join(dir, "mem.diff"))
	if err != nil {
		t.Fatal(err)
	}
	info, err := snapshot.NewLayerBuilder(snapshot.LayerInfo{ID: snapshot.ID{5}, MemoryBytes: 1 << 20, Base: base, Parent: base}).Finish(f)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	state := &snapshot.State{
		ID: snapshot.ID{5}, Shape: snapshot.Shape{VCPUs: 1, MemoryBytes: 1 << 20}, VCPUs: make([]snapshot.VCPU, 1),
		Host: snapshot.Host{Kernel: "6.1", KVM: "kvm_amd"}, Memory: snapshot.Memory{Kind: snapshot.Diff, Sums: sums, Top: info.Name()},
	}
	put := func() {
		if err := os.WriteFile(filepath.Join(dir, "vmstate"), state.Encode(), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put()
	if got := runApp(t, nil, "", "snapshot", "verify", dir); got.code != 0 {
		t.Errorf("%+v", got)
	}
	if got := runApp(t, nil, "", "snapshot", "inspect", dir); got.code != 0 || !strings.Contains(got.stdout, "Linux 6.1, kvm_amd") || !strings.Contains(got.stdout, "memory layer 1") {
		t.Errorf("%+v", got)
	}
	state.Memory.Sums[0]++ // of another base
	put()
	if got := runApp(t, nil, "", "snapshot", "verify", dir); got.code != 1 || !strings.Contains(got.stderr, "memory layer 1, header") {
		t.Errorf("a layer over another base passed: %+v", got)
	}
}
