package guestmem_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"sync"
	"testing"

	"torpor/vmm/guestmem"
)

const page = guestmem.PageSize

// twoRegions has RAM at 0-2 pages and at 4-5 pages.
func twoRegions(t testing.TB) *guestmem.Memory {
	t.Helper()
	m, err := guestmem.New([]guestmem.Region{
		{GPA: 4 * page, Bytes: make([]byte, page)},
		{GPA: 0, Bytes: make([]byte, 2*page)},
	})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestNewRefuses(t *testing.T) {
	whole := make([]byte, 2*page)
	for name, regions := range map[string][]guestmem.Region{
		"nothing":            nil,
		"an empty region":    {{GPA: 0, Bytes: nil}},
		"half a page":        {{GPA: 0, Bytes: whole[:page/2]}},
		"an odd address":     {{GPA: 7, Bytes: whole}},
		"an overlap":         {{GPA: page, Bytes: whole}, {GPA: 0, Bytes: whole}},
		"the same twice":     {{GPA: 0, Bytes: whole}, {GPA: 0, Bytes: whole}},
		"a wrap-around":      {{GPA: math.MaxUint64 - page + 1, Bytes: whole}},
		"misaligned storage": {{GPA: 0, Bytes: whole[1 : 1+page]}},
	} {
		if _, err := guestmem.New(regions); err == nil {
			t.Errorf("took %s", name)
		}
	}
}

func TestBounds(t *testing.T) {
	m := twoRegions(t)
	if m.Size() != 3*page || len(m.Regions()) != 2 || m.Regions()[0].GPA != 0 {
		t.Fatalf("size %d, regions %v", m.Size(), m.Regions())
	}
	for _, c := range []struct {
		at guestmem.Addr
		n  uint64
		ok bool
	}{
		{0, 2 * page, true},
		{0, 0, true},
		{0, 2*page + 1, false},
		{2*page - 1, 1, true},
		{2*page - 1, 2, false},
		{2 * page, 0, false},
		{3 * page, 1, false},
		{4*page - 1, 2, false},
		{4 * page, page, true},
		{5 * page, 1, false},
		{1, math.MaxUint64, false},
		{math.MaxUint64, 2, false},
		{math.MaxUint64, math.MaxUint64, false},
	} {
		if got := m.Contains(c.at, c.n); got != c.ok {
			t.Errorf("%d bytes at %#x: %v", c.n, uint64(c.at), got)
		}
		if c.n > 4*page {
			continue
		}
		p := bytes.Repeat([]byte{9}, int(c.n))
		for op, err := range map[string]error{"write": m.WriteAt(p, c.at), "read": m.ReadAt(p, c.at), "zero": m.Zero(c.at, c.n)} {
			var access *guestmem.AccessError
			if (err == nil) != c.ok || err != nil && (!errors.As(err, &access) || access.Addr != c.at || !errors.Is(err, guestmem.ErrRange)) {
				t.Errorf("%s of %d bytes at %#x: %v", op, c.n, uint64(c.at), err)
			}
		}
	}
}

func TestValuesAreLittleEndian(t *testing.T) {
	m := twoRegions(t)
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	check(m.WriteUint64(1, 0x0807060504030201))
	v16, err := m.ReadUint16(2)
	check(err)
	v32, err := m.ReadUint32(3)
	check(err)
	v64, err := m.ReadUint64(1)
	check(err)
	if v16 != 0x0302 || v32 != 0x06050403 || v64 != 0x0807060504030201 {
		t.Errorf("%#x %#x %#x", v16, v32, v64)
	}
	check(m.WriteUint32(5, 0xddccbbaa))
	check(m.WriteUint16(8, 0x2211))
	p := make([]byte, 10)
	check(m.ReadAt(p, 0))
	if want := []byte{0, 1, 2, 3, 4, 0xaa, 0xbb, 0xcc, 0x11, 0x22}; !bytes.Equal(p, want) {
		t.Errorf("%x, want %x", p, want)
	}
}

func TestAtomicHalves(t *testing.T) {
	m := twoRegions(t)
	for _, at := range []guestmem.Addr{0, 2, 2*page - 2, 2*page - 4, 4 * page, 5*page - 2} {
		if err := errors.Join(m.WriteUint16(at^2, 0xeeee), m.StoreUint16(at, 0x1234)); err != nil {
			t.Fatal(err)
		}
		got, err := m.LoadUint16(at)
		plain, err2 := m.ReadUint16(at)
		beside, err3 := m.ReadUint16(at ^ 2)
		if errors.Join(err, err2, err3) != nil || got != 0x1234 || plain != got || beside != 0xeeee {
			t.Errorf("at %#x: %#x, %#x, beside %#x", uint64(at), got, plain, beside)
		}
	}
	for _, at := range []guestmem.Addr{1, 3, 2*page - 1} {
		if _, err := m.LoadUint16(at); !errors.Is(err, guestmem.ErrMisaligned) {
			t.Errorf("load at %#x: %v", uint64(at), err)
		}
		if err := m.StoreUint16(at, 1); !errors.Is(err, guestmem.ErrMisaligned) {
			t.Errorf("store at %#x: %v", uint64(at), err)
		}
	}
	if err := m.StoreUint16(2*page, 1); !errors.Is(err, guestmem.ErrRange) {
		t.Errorf("store outside: %v", err)
	}
}

// Two writers of the halves of a word do not undo each other's stores.
func TestAtomicHalvesDoNotDisturbEachOther(t *testing.T) {
	m := twoRegions(t)
	var wg sync.WaitGroup
	for _, at := range []guestmem.Addr{0, 2} {
		wg.Go(func() {
			for i := range uint16(20000) {
				if err := m.StoreUint16(at, i); err != nil {
					t.Error(err)
					return
				}
				if got, _ := m.LoadUint16(at); got != i {
					t.Errorf("at %d: %d, want %d", at, got, i)
					return
				}
			}
		})
	}
	wg.Wait()
}

// A page whose file was cut short fails the access, not the process.
func TestLostPageIsAnError(t *testing.T) {
	path := filepath.Join(t.TempDir(), "mem")
	if err := os.WriteFile(path, bytes.Repeat([]byte{7}, 4*page), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	b, err := guestmem.MapPrivate(int(f.Fd()), page, 3*page)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	defer guestmem.Unmap(b)
	m, err := guestmem.New([]guestmem.Region{{GPA: 0, Bytes: b}})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.WriteAt([]byte{8}, 0); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 2*page); err != nil {
		t.Fatal(err)
	}
	p := make([]byte, 2*page)
	_, load := m.LoadUint16(2 * page)
	for op, err := range map[string]error{
		"read": m.ReadAt(p, page), "write": m.WriteAt(p, page), "store": m.StoreUint16(2*page, 1), "load": load,
	} {
		if !errors.Is(err, guestmem.ErrFault) {
			t.Errorf("%s: %v", op, err)
		}
	}
	// What is left of the file is still there.
	if err := m.ReadAt(p[:2], 0); err != nil || p[0] != 8 || p[1] != 7 {
		t.Errorf("%v, %v", p[:2], err)
	}
}

func TestGuardLetsOtherPanicsThrough(t *testing.T) {
	for name, f := range map[string]func(){
		"panic":       func() { panic("mine") },
		"nil pointer": func() { nowhere.end++ },
		"index":       func() { _ = make([]int, 1)[len(t.Name()):] },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s was swallowed", name)
				}
			}()
			guestmem.Guard(make([]byte, 8), f)
		}()
	}
}

// nowhere is nil, which the compiler and the linters do not know.
var nowhere *struct{ end int }

func TestMapping(t *testing.T) {
	path := filepath.Join(t.TempDir(), "mem")
	if err := os.WriteFile(path, make([]byte, page), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b, err := guestmem.MapPrivate(int(f.Fd()), 0, page)
	if err != nil {
		t.Fatal(err)
	}
	b[0] = 1
	if err := guestmem.Unmap(b); err != nil {
		t.Fatal(err)
	}
	if raw, err := os.ReadFile(path); err != nil || raw[0] != 0 {
		t.Errorf("the file was changed: %v", err)
	}
	for _, size := range []uint64{0, 1, page + 1, 1 << 60, math.MaxUint64 - page + 1} {
		if _, err := guestmem.MapAnon(size); err == nil {
			t.Errorf("mapped %d bytes", size)
		}
	}
	if _, err := guestmem.MapPrivate(-1, 0, page); err == nil {
		t.Error("mapped no file")
	}
}

// Both kinds of mapping begin at a large page, and leave nothing mapped around them.
func TestMappingIsAligned(t *testing.T) {
	f, err := os.CreateTemp(t.TempDir(), "mem")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const size = 3<<20 + page
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	before := mapped(t)
	var all [][]byte
	for range 8 {
		anon, err := guestmem.MapAnon(size)
		if err != nil {
			t.Fatal(err)
		}
		private, err := guestmem.MapPrivate(int(f.Fd()), 0, size)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, anon, private)
	}
	for i, b := range all {
		if at := reflect.ValueOf(b).Pointer(); at%(2<<20) != 0 || len(b) != size || cap(b) != size {
			t.Errorf("mapping %d at %#x, %d bytes", i, at, len(b))
		}
		b[0], b[size-1] = 1, 2
		if err := guestmem.Unmap(b); err != nil {
			t.Error(err)
		}
	}
	// The runtime may map a little of its own meanwhile.
	if after := mapped(t); after > before+size {
		t.Errorf("%d bytes are mapped, %d were", after, before)
	}
}

// mapped is the size of this process's address space, in bytes.
func mapped(t *testing.T) (n uint64) {
	t.Helper()
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscan(string(b), &n); err != nil {
		t.Fatal(err)
	}
	return n * page
}

// FuzzAccess compares every access with a flat copy of the whole address range.
func FuzzAccess(f *testing.F) {
	f.Add(uint64(0), uint64(8), []byte("seed"))
	f.Add(uint64(2*page-2), uint64(4), []byte("across the end"))
	f.Add(uint64(4*page), uint64(page), []byte{})
	f.Add(uint64(math.MaxUint64), uint64(math.MaxUint64), []byte{1})
	f.Fuzz(func(t *testing.T, at, n uint64, p []byte) {
		m := twoRegions(t)
		a := guestmem.Addr(at)
		within := func(n uint64) bool {
			for _, r := range m.Regions() {
				if start, size := uint64(r.GPA), uint64(len(r.Bytes)); at >= start && at < start+size && n <= start+size-at {
					return true
				}
			}
			return false
		}
		if got := m.Contains(a, n); got != within(n) {
			t.Errorf("contains %d bytes at %#x: %v", n, at, got)
		}
		err := m.WriteAt(p, a)
		if (err == nil) != within(uint64(len(p))) {
			t.Fatalf("write of %d bytes at %#x: %v", len(p), at, err)
		}
		if got := make([]byte, len(p)); err == nil && (m.ReadAt(got, a) != nil || !bytes.Equal(got, p)) {
			t.Errorf("other bytes come back")
		}
		if err := m.StoreUint16(a, 0xabcd); (err == nil) != (at%2 == 0 && within(2)) {
			t.Errorf("store at %#x: %v", at, err)
		}
	})
}
