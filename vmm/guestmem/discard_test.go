package guestmem_test

import (
	"bytes"
	"errors"
	"math"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"torpor/vmm/guestmem"
)

// mapped has RAM at pages 0-4 and 6-8: anonymous, or the bytes 7 of a file.
func mapMemory(t testing.TB, ofFile bool) *guestmem.Memory {
	t.Helper()
	path := filepath.Join(t.TempDir(), "mem")
	if err := os.WriteFile(path, bytes.Repeat([]byte{7}, 6*page), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var regions []guestmem.Region
	for at, pages := range map[guestmem.Addr]uint64{0: 4, 6 * page: 2} {
		b, err := guestmem.MapAnon(pages * page)
		if ofFile {
			b, err = guestmem.MapPrivate(int(f.Fd()), int64(at)/6*4, pages*page)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { guestmem.Unmap(b) })
		regions = append(regions, guestmem.Region{GPA: at, Bytes: b})
	}
	m, err := guestmem.New(regions)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestDiscard(t *testing.T) {
	for _, c := range []struct {
		name  string
		at    guestmem.Addr
		n     uint64
		pages string // which of the pages 0-7 fall back, R; kept, .; no RAM, space
	}{
		{"nothing", page, 0, "....  .."},
		{"a page", page, page, ".R..  .."},
		{"less than a page", page + 1, page - 1, "....  .."},
		{"nearly two pages", page, 2*page - 1, ".R..  .."},
		{"nearly three pages", 1, 3*page - 2, ".R..  .."},
		{"the first region's end", 2 * page, 3 * page, "..RR  .."},
		{"across the hole", 3 * page, 4 * page, "...R  R."},
		{"in the hole", 4 * page, 2 * page, "....  .."},
		{"behind the last", 8 * page, math.MaxUint64 - 8*page, "....  .."},
		{"from the last on, without end", 7 * page, math.MaxUint64, "....  .R"},
		{"all there could be", 0, math.MaxUint64, "RRRR  RR"},
		{"an address that wraps", math.MaxUint64, 2 * page, "....  .."},
	} {
		for _, ofFile := range []bool{false, true} {
			m, below := mapMemory(t, ofFile), byte(0)
			if ofFile {
				below = 7
			}
			for _, r := range m.Regions() {
				if err := m.WriteAt(bytes.Repeat([]byte{9}, len(r.Bytes)), r.GPA); err != nil {
					t.Fatal(err)
				}
			}
			got, err := m.Discard(c.at, c.n)
			if err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
			if want := uint64(bytes.Count([]byte(c.pages), []byte("R"))) * page; got != want {
				t.Errorf("%s: discarded %d bytes, want %d", c.name, got, want)
			}
			for i, what := range []byte(c.pages) {
				want := map[byte]byte{'R': below, '.': 9}[what]
				p := make([]byte, page)
				if what != ' ' && (m.ReadAt(p, guestmem.Addr(i)*page) != nil || !bytes.Equal(p, bytes.Repeat([]byte{want}, page))) {
					t.Errorf("%s, of a file %v: page %d has %d, want %d", c.name, ofFile, i, p[0], want)
				}
			}
		}
	}
}

func TestDiscardReportsWhatTheHostRefuses(t *testing.T) {
	m := mapMemory(t, false)
	if err := unix.Mlock(m.Regions()[0].Bytes[:page]); err != nil { // locked pages are not discarded
		t.Skipf("needs to lock a page: %v", err)
	}
	var access *guestmem.AccessError
	if _, err := m.Discard(0, page); !errors.As(err, &access) || !errors.Is(err, unix.EINVAL) {
		t.Errorf("%v", err)
	}
}

// FuzzDiscard compares with the definition, page by page.
func FuzzDiscard(f *testing.F) {
	f.Add(uint64(0), uint64(8*page))
	f.Add(uint64(page+1), uint64(2*page))
	f.Add(uint64(3*page), uint64(math.MaxUint64))
	f.Add(uint64(math.MaxUint64-1), uint64(3))
	f.Fuzz(func(t *testing.T, at, n uint64) {
		m := mapMemory(t, false)
		want := uint64(0)
		for _, i := range []uint64{0, 1, 2, 3, 6, 7} {
			if err := m.WriteAt([]byte{9}, guestmem.Addr(i*page)); err != nil {
				t.Fatal(err)
			}
			if at <= i*page && n >= (i+1)*page-at {
				want++
			}
		}
		got, err := m.Discard(guestmem.Addr(at), n)
		if err != nil || got != want*page {
			t.Fatalf("%d bytes, %v; want %d", got, err, want*page)
		}
		for _, i := range []uint64{0, 1, 2, 3, 6, 7} {
			var p [1]byte
			inside := at <= i*page && n >= (i+1)*page-at
			if err := m.ReadAt(p[:], guestmem.Addr(i*page)); err != nil || (p[0] == 0) != inside {
				t.Errorf("page %d: %d, %v", i, p[0], err)
			}
		}
	})
}
