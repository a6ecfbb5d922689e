package kernel

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"strings"
	"testing"

	"github.com/pierrec/lz4/v4"
)

func TestExtractVmlinux(t *testing.T) {
	tests := []struct {
		name   string
		plain  []byte
		image  []byte
		change func([]byte) []byte
		errHas string // empty: must work
	}{
		{name: "one block", plain: testELF(0)},
		{name: "three blocks", plain: testELF(2*lz4BlockPlain + 17)},
		{name: "four sectors by default", plain: testELF(0), change: func(b []byte) []byte {
			b[offSetupSects] = 0
			return b
		}},
		{name: "empty", image: []byte{}, errHas: "too few"},
		{name: "no magic", image: make([]byte, 4096), errHas: "no bzImage header"},
		{name: "old protocol", plain: testELF(0), change: put16(offVersion, 0x020b), errHas: "older"},
		{name: "32-bit only", plain: testELF(0), change: put16(offXLoadFlags, 0), errHas: "64-bit entry"},
		{name: "cut short", plain: testELF(0), change: func(b []byte) []byte { return b[:len(b)-1] }, errHas: "cut short"},
		{name: "payload offset beyond", plain: testELF(0), change: put32(offPayloadOffset, 0xffffffff), errHas: "cut short"},
		{name: "tiny payload", plain: testELF(0), change: put32(offPayloadLength, 7), errHas: "payload of 7"},
		{name: "gzip", plain: testELF(0), change: put32(payloadAt, 0x00088b1f), errHas: "legacy magic"},
		{name: "zero block", plain: testELF(0), change: put32(payloadAt+4, 0), errHas: "block of 0"},
		{name: "huge block", plain: testELF(0), change: put32(payloadAt+4, 0xfffffff0), errHas: "an LZ4 block of"},
		{name: "wrong size", plain: testELF(0), change: lastWord(1 << 20), errHas: "trailer says"},
		{name: "too small a size", plain: testELF(0), change: lastWord(1), errHas: "LZ4 block at"},
		{name: "absurd size", plain: testELF(0), change: lastWord(0xffffffff), errHas: "more than"},
		{name: "no ELF inside", plain: bytes.Repeat([]byte("text"), 100), errHas: "not an ELF"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			image := tt.image
			if image == nil {
				image = testBzImage(t, tt.plain)
			}
			if tt.change != nil {
				image = tt.change(image)
			}
			got, err := ExtractVmlinux(image)
			if tt.errHas == "" {
				if err != nil || !bytes.Equal(got, tt.plain) {
					t.Fatalf("%d bytes, error %v; want the %d bytes put in", len(got), err, len(tt.plain))
				}
				return
			}
			if !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), tt.errHas) {
				t.Fatalf("error %v, want ErrFormat with %q", err, tt.errHas)
			}
		})
	}
}

func TestCheckVmlinux(t *testing.T) {
	tests := []struct {
		name   string
		change func([]byte) []byte
		errHas string
	}{
		{"right", func(b []byte) []byte { return b }, ""},
		{"other machine", put16(18, uint16(elf.EM_AARCH64)), "EM_AARCH64"},
		{"position independent", put16(16, uint16(elf.ET_DYN)), "ET_DYN"},
		{"entry elsewhere", put32(24, 0x99999), "entry point"},
		{"segment beyond the file", put32(64+32, 1<<30), "segment"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := CheckVmlinux(tt.change(testELF(0)))
			if tt.errHas == "" && err != nil || tt.errHas != "" && (err == nil || !strings.Contains(err.Error(), tt.errHas)) {
				t.Fatalf("error %v, want %q", err, tt.errHas)
			}
		})
	}
}

func FuzzExtractVmlinux(f *testing.F) {
	good := testBzImage(f, testELF(100))
	f.Add(good)
	f.Add(good[:headerEnd])
	f.Add(put32(offPayloadLength, 9)(bytes.Clone(good)))
	f.Add(lastWord(1 << 24)(bytes.Clone(good)))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, image []byte) {
		vmlinux, err := ExtractVmlinux(image)
		if err != nil {
			if !errors.Is(err, ErrFormat) {
				t.Fatalf("error %v does not wrap ErrFormat", err)
			}
			return
		}
		if err := CheckVmlinux(vmlinux); err != nil {
			t.Fatalf("gave a kernel that fails its own check: %v", err)
		}
	})
}

const (
	testSetupSects = 4
	payloadAt      = (testSetupSects + 1) * sectorSize
)

// testBzImage wraps plain as the kernel's build does: setup sectors, LZ4 legacy frame, size.
func testBzImage(t testing.TB, plain []byte) []byte {
	t.Helper()
	var payload bytes.Buffer
	w := lz4.NewWriter(&payload)
	if err := w.Apply(lz4.LegacyOption(true)); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(plain); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	le := binary.LittleEndian
	b := make([]byte, payloadAt, payloadAt+payload.Len()+4)
	b[offSetupSects] = testSetupSects
	le.PutUint16(b[offBootFlag:], bootFlag)
	le.PutUint32(b[offHeaderMagic:], headerMagic)
	le.PutUint16(b[offVersion:], 0x020f)
	le.PutUint16(b[offXLoadFlags:], xlfKernel64)
	le.PutUint32(b[offPayloadLength:], uint32(payload.Len()+4))
	b = append(b, payload.Bytes()...)
	return le.AppendUint32(b, uint32(len(plain)))
}

// testELF is a kernel of one segment whose entry is its first byte, with n bytes of content.
func testELF(n int) []byte {
	const headers = 64 + 56
	n += 16
	b := make([]byte, headers+n)
	le := binary.LittleEndian
	copy(b, "\x7fELF\x02\x01\x01")
	le.PutUint16(b[16:], uint16(elf.ET_EXEC))
	le.PutUint16(b[18:], uint16(elf.EM_X86_64))
	le.PutUint32(b[20:], 1)
	le.PutUint64(b[24:], 0x1000000) // entry
	le.PutUint64(b[32:], 64)        // program headers
	le.PutUint16(b[52:], 64)
	le.PutUint16(b[54:], 56)
	le.PutUint16(b[56:], 1)
	p := b[64:]
	le.PutUint32(p, uint32(elf.PT_LOAD))
	le.PutUint64(p[8:], headers)
	le.PutUint64(p[16:], 0xffffffff81000000)
	le.PutUint64(p[24:], 0x1000000)
	le.PutUint64(p[32:], uint64(n))
	le.PutUint64(p[40:], uint64(n))
	for i := range b[headers:] {
		b[headers+i] = byte(i / 3)
	}
	return b
}

func put16(at int, v uint16) func([]byte) []byte {
	return func(b []byte) []byte {
		binary.LittleEndian.PutUint16(b[at:], v)
		return b
	}
}

func put32(at int, v uint32) func([]byte) []byte {
	return func(b []byte) []byte {
		binary.LittleEndian.PutUint32(b[at:], v)
		return b
	}
}

func lastWord(v uint32) func([]byte) []byte {
	return func(b []byte) []byte { return put32(len(b)-4, v)(b) }
}
