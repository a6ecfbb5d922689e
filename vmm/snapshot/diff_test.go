package snapshot_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"torpor/vmm/snapshot"
)

// reseal puts right checksums over a diff that was tampered with.
func reseal(b []byte) {
	le := binary.LittleEndian
	table := b[le.Uint64(b[24:]):]
	le.PutUint32(b[48:], snapshot.Checksum(table[:32*le.Uint32(b[12:])]))
	le.PutUint32(b[60:], snapshot.Checksum(b[:60]))
}

// What a checksum vouches for may still be against the format: it is refused all the same.
func TestDiffThatBreaksTheFormatIsRefused(t *testing.T) {
	le := binary.LittleEndian
	table := func(b []byte) []byte { return b[le.Uint64(b[24:]):] }
	for name, harm := range map[string]func(b []byte) []byte{
		"a reserved byte of the header": func(b []byte) []byte { b[55] = 1; return b },
		"a reserved byte of a run":      func(b []byte) []byte { table(b)[28] = 1; return b },
		"memory of half a page":         func(b []byte) []byte { le.PutUint64(b[16:], le.Uint64(b[16:])-7); return b },
		"more runs than pages":          func(b []byte) []byte { le.PutUint64(b[16:], 4096); return b },
		"a run of no pages":             func(b []byte) []byte { le.PutUint32(table(b)[16:], 0); return b },
		"a run beyond memory":           func(b []byte) []byte { le.PutUint64(table(b), 1<<63); return b },
		"an unknown kind":               func(b []byte) []byte { le.PutUint32(table(b)[20:], 3); return b },
		"a run of data elsewhere":       func(b []byte) []byte { le.PutUint64(table(b)[8:], 8192); return b },
		"a gap before the table": func(b []byte) []byte {
			off := le.Uint64(b[24:])
			out := append(append(bytes.Clone(b[:off]), make([]byte, snapshot.PageSize)...), b[off:]...)
			le.PutUint64(out[24:], off+snapshot.PageSize)
			return out
		},
	} {
		b := harm(bytes.Clone(sampleDiff(t).b))
		reseal(b)
		if _, err := snapshot.OpenDiff(&file{b: b}); !errors.Is(err, snapshot.ErrFormat) {
			t.Errorf("%s: %v", name, err)
		}
	}
	b := bytes.Clone(sampleDiff(t).b)
	reseal(b)
	if _, err := snapshot.OpenDiff(&file{b: b}); err != nil {
		t.Errorf("untouched: %v", err)
	}
}

// pattern is a diff file whose data is one chunk over and over: it keeps the chunk, and what is not data.
type pattern struct {
	chunk []byte
	rest  map[int64][]byte
}

func (p *pattern) WriteAt(b []byte, off int64) (int, error) {
	if len(b) != len(p.chunk) {
		p.rest[off] = bytes.Clone(b)
	}
	return len(b), nil
}

func (p *pattern) ReadAt(b []byte, off int64) (int, error) {
	for at, r := range p.rest {
		if off >= at && off+int64(len(b)) <= at+int64(len(r)) {
			return copy(b, r[off-at:]), nil
		}
	}
	return copy(b, p.chunk), nil
}

// A diff larger than 4 GiB: its offsets do not fit 32 bits.
func TestDiffBeyond4GiB(t *testing.T) {
	const memory, chunks = 16 << 30, 4<<10 + 40
	p := &pattern{chunk: bytes.Repeat([]byte{1, 2, 3, 4}, snapshot.ChunkBytes/4), rest: map[int64][]byte{}}
	w := snapshot.NewDiffWriter(p, snapshot.ID{1}, memory)
	const stride = 3 * snapshot.ChunkBytes / snapshot.PageSize // pages from chunk to chunk: up to 12 GiB
	for i := range uint64(chunks) {
		if err := w.Data(i*stride, p.chunk); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.Finish(); err != nil {
		t.Fatal(err)
	}
	d, err := snapshot.OpenDiff(p)
	if err != nil {
		t.Fatal(err)
	}
	if len(d.Runs) != chunks || d.Info.DataPages != chunks*snapshot.ChunkBytes/snapshot.PageSize {
		t.Fatalf("%d runs, %+v", len(d.Runs), d.Info)
	}
	last := d.Runs[chunks-1]
	if last.Page != (chunks-1)*stride || last.Offset != snapshot.PageSize+(chunks-1)*snapshot.ChunkBytes {
		t.Errorf("last run %+v", last)
	}
	b := make([]byte, last.Bytes())
	if err := d.ReadRun(last, b); err != nil || !bytes.Equal(b, p.chunk) {
		t.Errorf("last run: %v", err)
	}
}
