package loader_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	"torpor/vmm/guestmem"
	"torpor/vmm/loader"
)

func newMemory(tb testing.TB, size int) *guestmem.Memory {
	tb.Helper()
	b, err := guestmem.MapAnon(uint64(size))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = guestmem.Unmap(b) })
	m, err := guestmem.New([]guestmem.Region{{GPA: 0, Bytes: b}})
	if err != nil {
		tb.Fatal(err)
	}
	return m
}

type seg struct{ off, addr, fileSize, memSize uint64 }

// elf makes a kernel file with the given segments; the file is as long as size.
func elf(entry uint64, size int, segs ...seg) []byte {
	le := binary.LittleEndian
	b := make([]byte, max(size, 64+56*len(segs)))
	for i := range b {
		b[i] = byte(i * 7)
	}
	clear(b[:64+56*len(segs)])
	copy(b, "\x7fELF\x02\x01\x01")
	le.PutUint16(b[16:], 2)
	le.PutUint16(b[18:], 62)
	le.PutUint64(b[24:], entry)
	le.PutUint64(b[32:], 64)
	le.PutUint16(b[54:], 56)
	le.PutUint16(b[56:], uint16(len(segs)))
	for i, s := range segs {
		p := b[64+56*i:]
		le.PutUint32(p, 1)
		le.PutUint64(p[8:], s.off)
		le.PutUint64(p[24:], s.addr)
		le.PutUint64(p[32:], s.fileSize)
		le.PutUint64(p[40:], s.memSize)
	}
	return b
}

func TestELFLoadsItsSegments(t *testing.T) {
	m := newMemory(t, 4<<20)
	file := elf(0x100010, 0x3000, seg{0x1000, 0x100000, 0x800, 0x1000}, seg{0x1800, 0x200000, 0x1800, 0x4000})
	k, err := loader.ELF(bytes.NewReader(file), m, 0x100000)
	if err != nil {
		t.Fatal(err)
	}
	if k.Entry != 0x100010 || k.Start != 0x100000 || k.End != 0x204000 {
		t.Errorf("%+v", k)
	}
	got := make([]byte, 0x1800)
	if err := m.ReadAt(got, 0x200000); err != nil || !bytes.Equal(got, file[0x1800:]) {
		t.Errorf("second segment differs (%v)", err)
	}
}

func TestELFRefusesWhatCannotBoot(t *testing.T) {
	good := seg{0x1000, 0x100000, 0x800, 0x1000}
	for name, file := range map[string][]byte{
		"empty":                    nil,
		"bzImage":                  append([]byte("MZ"), make([]byte, 4096)...),
		"no segments":              elf(0x100000, 0x2000),
		"entry outside":            elf(0x900000, 0x2000, good),
		"below the floor":          elf(0x1000, 0x2000, seg{0x1000, 0x1000, 0x800, 0x1000}),
		"above memory":             elf(0x3ff000, 0x2000, seg{0x1000, 0x3ff000, 0x800, 0x10000}),
		"file longer than memory":  elf(0x100000, 0x2000, seg{0x1000, 0x100000, 0x1000, 0x800}),
		"wraps around":             elf(0x100000, 0x2000, seg{0x1000, ^uint64(0) - 0xfff, 0x800, 0x2000}),
		"ends after the file":      elf(0x100000, 0x1400, good),
		"negative file offset":     elf(0x100000, 0x2000, seg{1 << 63, 0x100000, 0x800, 0x1000}),
		"headers end after a file": elf(0x100000, 0, good)[:100],
	} {
		if _, err := loader.ELF(bytes.NewReader(file), newMemory(t, 4<<20), 0x100000); !errors.Is(err, loader.ErrKernel) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Wherever an initrd goes, it lies between kernel and limit, page-aligned, and overlaps nothing.
func TestInitrdPlacement(t *testing.T) {
	m := newMemory(t, 4<<20)
	rng := rand.New(rand.NewPCG(3, 4))
	for range 300 {
		size, floor, limit := 1+rng.Int64N(2<<20), rng.Uint64N(4<<20), rng.Uint64N(4<<20)
		content := make([]byte, size)
		content[0], content[size-1] = 1, 2
		addr, err := loader.Initrd(bytes.NewReader(content), size, m, floor, limit)
		fits := floor <= limit && uint64(size) <= limit && (limit-uint64(size))&^0xfff >= floor
		if (err == nil) != fits {
			t.Fatalf("size %#x floor %#x limit %#x: %v", size, floor, limit, err)
		}
		if err == nil && (addr%4096 != 0 || addr < floor || addr+uint64(size) > limit) {
			t.Fatalf("size %#x floor %#x limit %#x: placed at %#x", size, floor, limit, addr)
		}
	}
}

func TestCmdline(t *testing.T) {
	m := newMemory(t, 1<<20)
	if err := loader.Cmdline("console=ttyS0", m, 0x20000, 2047); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 14)
	if err := m.ReadAt(got, 0x20000); err != nil || string(got) != "console=ttyS0\x00" {
		t.Errorf("%q %v", got, err)
	}
	for _, bad := range []string{strings.Repeat("x", 2048), "a\x00b", "a\nb"} {
		if err := loader.Cmdline(bad, m, 0x20000, 2047); err == nil {
			t.Errorf("accepted %.10q", bad)
		}
	}
}

func FuzzELF(f *testing.F) {
	f.Add(elf(0x100010, 0x3000, seg{0x1000, 0x100000, 0x800, 0x1000}, seg{0x1800, 0x200000, 0x1800, 0x4000}))
	f.Add(elf(0x100000, 0x2000, seg{1 << 63, 0x100000, 0x800, 0x1000}))
	f.Add([]byte("\x7fELF\x02\x01\x01"))
	m := newMemory(f, 4<<20)
	f.Fuzz(func(t *testing.T, file []byte) {
		k, err := loader.ELF(bytes.NewReader(file), m, 0x100000)
		if err == nil && (k.Entry < k.Start || k.Entry >= k.End || k.Start < 0x100000 || k.End > 4<<20) {
			t.Errorf("%+v", k)
		}
		if err != nil && !errors.Is(err, loader.ErrKernel) {
			t.Error(err)
		}
	})
}
