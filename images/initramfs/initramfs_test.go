package initramfs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cavaliergopher/cpio"
)

var update = flag.Bool("update", false, "write the golden files anew")

func TestArchiveGolden(t *testing.T) {
	entries := []entry{
		{name: "dev", mode: typeDir | 0o755},
		{name: "dev/console", mode: typeChar | 0o600, major: 5, minor: 1},
		{name: "empty", mode: typeRegular | 0o644},
		{name: "init", mode: typeRegular | 0o755, content: []byte("#!/bin/sh\n")},
	}
	var b bytes.Buffer
	if err := writeArchive(&b, entries); err != nil {
		t.Fatal(err)
	}
	golden := filepath.Join("testdata", "small.cpio")
	if *update {
		if err := os.WriteFile(golden, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(b.Bytes(), want) {
		t.Errorf("the archive changed:\n%q\nwant\n%q", b.Bytes(), want)
	}
}

func TestArchiveRefusesNames(t *testing.T) {
	for _, name := range []string{"", "/init", "TRAILER!!!", "a\x00b"} {
		if err := writeArchive(io.Discard, []entry{{name: name}}); err == nil {
			t.Errorf("took the name %q", name)
		}
	}
}

func TestArchiveReportsWriteErrors(t *testing.T) {
	want := errors.New("full")
	err := writeArchive(failingWriter{want}, []entry{{name: "a", mode: typeRegular, content: make([]byte, 1<<16)}})
	if !errors.Is(err, want) {
		t.Errorf("error %v, want %v", err, want)
	}
}

type failingWriter struct{ err error }

func (w failingWriter) Write([]byte) (int, error) { return 0, w.err }

// Another cpio implementation must read what ours writes.
func TestWriteIsReadByOthers(t *testing.T) {
	dir := t.TempDir()
	envd := program(t, dir, 0)
	modules := []string{filepath.Join(dir, "b.ko"), filepath.Join(dir, "a-x.ko")}
	for i, m := range modules {
		if err := os.WriteFile(m, bytes.Repeat([]byte{byte(i + 1)}, 5+i), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var first, second bytes.Buffer
	for _, w := range []*bytes.Buffer{&first, &second} {
		if err := Write(w, Inputs{Envd: envd, Modules: modules}); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(first.Bytes(), second.Bytes()) {
		t.Error("two runs differ")
	}
	files := readAll(t, &first)
	if got, want := files["modules.order"], "/modules/b.ko\n/modules/a-x.ko\n"; got != want {
		t.Errorf("modules.order is %q, want %q", got, want)
	}
	if got, want := files["modules/a-x.ko"], "\x02\x02\x02\x02\x02\x02"; got != want {
		t.Errorf("a-x.ko is %q, want %q", got, want)
	}
	for _, name := range []string{"init", "dev", "dev/console", "proc", "sys", "newroot"} {
		if _, ok := files[name]; !ok {
			t.Errorf("no %s", name)
		}
	}
}

func TestCheckStatic(t *testing.T) {
	dir := t.TempDir()
	const interpreter = 3 // PT_INTERP
	tests := []struct {
		name   string
		file   string
		errHas string
	}{
		{"static", program(t, dir, 0), ""},
		{"dynamic", program(t, dir, interpreter), "CGO_ENABLED=0"},
		{"text", os.Args[0] + "-none", "no such file"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := Write(io.Discard, Inputs{Envd: tt.file})
			if tt.errHas == "" && err != nil || tt.errHas != "" && (err == nil || !strings.Contains(err.Error(), tt.errHas)) {
				t.Errorf("error %v, want %q", err, tt.errHas)
			}
		})
	}
	if err := CheckStatic([]byte("#!/bin/sh\n")); err == nil {
		t.Error("took a shell script")
	}
}

func readAll(t *testing.T, r io.Reader) map[string]string {
	t.Helper()
	files := map[string]string{}
	cr := cpio.NewReader(r)
	for {
		h, err := cr.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(cr)
		if err != nil {
			t.Fatal(err)
		}
		files[h.Name] = string(content)
	}
}

// program writes an x86-64 ELF header with one program header of the given type.
func program(t *testing.T, dir string, segment uint32) string {
	t.Helper()
	le := binary.LittleEndian
	b := make([]byte, 64+56)
	copy(b, "\x7fELF\x02\x01\x01")
	le.PutUint16(b[16:], 2)
	le.PutUint16(b[18:], 62)
	le.PutUint32(b[20:], 1)
	le.PutUint64(b[32:], 64)
	le.PutUint16(b[52:], 64)
	le.PutUint16(b[54:], 56)
	le.PutUint16(b[56:], 1)
	le.PutUint32(b[64:], segment)
	f, err := os.CreateTemp(dir, "program")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return f.Name()
}
