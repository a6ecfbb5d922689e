package snapshot

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"testing"
)

func sampleWorkingSet() *WorkingSet {
	return &WorkingSet{MemoryBytes: 128 << 20, Runs: []Touched{
		{Page: 512, Pages: 16}, {Page: 600, Pages: 1, Written: true}, {Page: 3, Pages: 2, Stage: 1}, {Page: 1<<15 - 1, Pages: 1, Stage: 1<<16 - 1},
	}}
}

func TestWorkingSetRoundTrip(t *testing.T) {
	for name, want := range map[string]*WorkingSet{"some": sampleWorkingSet(), "none": {MemoryBytes: 1 << 30, Runs: []Touched{}}} {
		path := filepath.Join(t.TempDir(), "ws")
		if err := os.WriteFile(path, want.Encode(), 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		got, err := ReadWorkingSet(f)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	if all, written := sampleWorkingSet().Pages(); all != 20 || written != 1 {
		t.Errorf("%d pages, %d written", all, written)
	}
}

func TestWorkingSetFlippedBits(t *testing.T) {
	good := sampleWorkingSet().Encode()
	for i := range good {
		b := append([]byte{}, good...)
		b[i] ^= 0x10
		var broken *Error
		if _, err := DecodeWorkingSet(b); !errors.As(err, &broken) {
			t.Errorf("byte %d: %v", i, err)
		}
	}
	for n := range good {
		if _, err := DecodeWorkingSet(good[:n]); err == nil {
			t.Errorf("cut to %d bytes it was read", n)
		}
	}
}

func TestWorkingSetRefuses(t *testing.T) {
	for name, w := range map[string]*WorkingSet{
		"a run of nothing":    {MemoryBytes: 1 << 20, Runs: []Touched{{Page: 1}}},
		"beyond the memory":   {MemoryBytes: 1 << 20, Runs: []Touched{{Page: 255, Pages: 2}}},
		"wrapping":            {MemoryBytes: 1 << 20, Runs: []Touched{{Page: 1<<32 - 1, Pages: 1<<32 - 1}}},
		"more than there is":  {MemoryBytes: 1 << 20, Runs: []Touched{{Pages: 200}, {Pages: 100}}},
		"stages out of order": {MemoryBytes: 1 << 20, Runs: []Touched{{Pages: 1, Stage: 1}, {Page: 1, Pages: 1}}},
		"memory of odd size":  {MemoryBytes: 1<<20 + 1},
		"too much memory":     {MemoryBytes: 1 << 40},
	} {
		if _, err := DecodeWorkingSet(w.Encode()); !errors.Is(err, ErrFormat) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzWorkingSet(f *testing.F) {
	f.Add(sampleWorkingSet().Encode())
	f.Add((&WorkingSet{MemoryBytes: 1 << 30}).Encode())
	f.Add([]byte(workingSetMagic))
	f.Fuzz(func(t *testing.T, b []byte) {
		w, err := DecodeWorkingSet(b)
		if err != nil {
			return
		}
		if again := w.Encode(); string(again) != string(b) {
			t.Errorf("%x was read and encodes to %x", b, again)
		}
		for _, r := range w.Runs {
			if r.End()*PageSize > w.MemoryBytes {
				t.Errorf("a run of %d pages at %d in %d bytes", r.Pages, r.Page, w.MemoryBytes)
			}
		}
	})
}
