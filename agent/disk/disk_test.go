package disk_test

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"torpor/agent/disk"
	"torpor/vmm/cow"
)

const size = 1 << 20

// write makes a layer over others with one block of the given byte at off.
func write(t *testing.T, path string, below []string, off int64, b byte) {
	t.Helper()
	if err := (disk.Layers{}).Create(path, size); err != nil {
		t.Fatal(err)
	}
	chain, err := cow.OpenChain("", below, path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := chain.WriteAt(bytes.Repeat([]byte{b}, 4096), off); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(chain.Flush(), chain.Close()); err != nil {
		t.Fatal(err)
	}
}

func TestSealedLayerIsVerified(t *testing.T) {
	path := filepath.Join(t.TempDir(), "1.layer")
	write(t, path, nil, 0, 'a')
	if err := (disk.Layers{}).Seal(t.Context(), path); err != nil {
		t.Fatal(err)
	}
	if info, err := cow.Inspect(path); err != nil || !info.Sealed || info.DataBlocks != 1 {
		t.Errorf("%+v, %v", info, err)
	}
	if err := cow.Verify(path); err != nil {
		t.Error(err)
	}
}

func TestMergedLayerReadsAsTheChain(t *testing.T) {
	dir := t.TempDir()
	one, two, merged := filepath.Join(dir, "1.layer"), filepath.Join(dir, "2.layer"), filepath.Join(dir, "3.layer")
	write(t, one, nil, 0, 'a')
	write(t, two, []string{one}, 8192, 'b')
	if err := (disk.Layers{}).Merge(t.Context(), merged, []string{one, two}); err != nil {
		t.Fatal(err)
	}
	read := func(layers ...string) []byte {
		chain, err := cow.OpenChain("", layers, "")
		if err != nil {
			t.Fatal(err)
		}
		defer chain.Close()
		all := make([]byte, 16384)
		if _, err := chain.ReadAt(all, 0); err != nil {
			t.Fatal(err)
		}
		return all
	}
	got := read(merged)
	if !bytes.Equal(read(one, two), got) || got[0] != 'a' || got[8192] != 'b' {
		t.Error("the merged layer reads otherwise")
	}
}

func TestMergeDoesNotBeginAfterTheEnd(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := (disk.Layers{}).Merge(ctx, filepath.Join(t.TempDir(), "x"), nil); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestFree(t *testing.T) {
	if n, err := (disk.Layers{}).Free(t.TempDir()); err != nil || n == 0 {
		t.Errorf("got %d, %v", n, err)
	}
	if _, err := (disk.Layers{}).Free("/no/such/place"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

// Check reads a sealed layer that was written to, and no other.
func TestCheckFindsDamageInASealedLayer(t *testing.T) {
	path := filepath.Join(t.TempDir(), "1.layer")
	write(t, path, nil, 0, 'a')
	layers := disk.Layers{}
	if err := layers.Check(path); err != nil {
		t.Errorf("a layer without a seal: %v", err)
	}
	if err := layers.Seal(t.Context(), path); err != nil {
		t.Fatal(err)
	}
	if err := layers.Check(path); err != nil {
		t.Errorf("a sealed layer: %v", err)
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	raw[bytes.Index(raw, bytes.Repeat([]byte{'a'}, 4096))+5] ^= 1
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, ok := errors.AsType[*cow.CorruptError](layers.Check(path)); !ok {
		t.Errorf("a flipped bit: %v", layers.Check(path))
	}
}
