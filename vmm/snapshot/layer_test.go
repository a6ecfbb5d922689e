package snapshot_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"torpor/vmm/snapshot"
)

// reseal puts right checksums over a layer that was tampered with.
func reseal(b []byte) {
	le := binary.LittleEndian
	table := b[le.Uint64(b[24:]):]
	le.PutUint32(b[48:], snapshot.Checksum(table[:32*le.Uint32(b[12:])]))
	le.PutUint32(b[188:], snapshot.Checksum(b[:188]))
}

// What a checksum vouches for may still be against the format: it is refused all the same.
func TestLayerThatBreaksTheFormatIsRefused(t *testing.T) {
	le := binary.LittleEndian
	table := func(b []byte) []byte { return b[le.Uint64(b[24:]):] }
	for name, harm := range map[string]func(b []byte) []byte{
		"a reserved byte of the header": func(b []byte) []byte { b[55] = 1; return b },
		"another":                       func(b []byte) []byte { b[61] = 1; return b },
		"one near its end":              func(b []byte) []byte { b[180] = 1; return b },
		"one behind it":                 func(b []byte) []byte { b[200] = 1; return b },
		"a reserved byte of a run":      func(b []byte) []byte { table(b)[28] = 1; return b },
		"memory of half a page":         func(b []byte) []byte { le.PutUint64(b[16:], le.Uint64(b[16:])-7); return b },
		"more runs than pages":          func(b []byte) []byte { le.PutUint64(b[16:], 4096); return b },
		"no base":                       func(b []byte) []byte { clear(b[64:96]); return b },
		"no parent":                     func(b []byte) []byte { clear(b[96:128]); return b },
		"a run of no pages":             func(b []byte) []byte { le.PutUint32(table(b)[16:], 0); return b },
		"a run beyond memory":           func(b []byte) []byte { le.PutUint64(table(b), 1<<63); return b },
		"a run across a chunk": func(b []byte) []byte {
			le.PutUint64(table(b)[6*32:], 767)
			le.PutUint32(table(b)[6*32+16:], 2)
			return b
		},
		"an unknown kind":         func(b []byte) []byte { le.PutUint32(table(b)[20:], 4); return b },
		"a run of data elsewhere": func(b []byte) []byte { le.PutUint64(table(b)[8:], 8192); return b },
		"a gap before the table": func(b []byte) []byte {
			off := le.Uint64(b[24:])
			out := append(append(bytes.Clone(b[:off]), make([]byte, snapshot.PageSize)...), b[off:]...)
			le.PutUint64(out[24:], off+snapshot.PageSize)
			return out
		},
	} {
		f, _ := sampleLayer(t)
		b := harm(f.b)
		reseal(b)
		if _, err := snapshot.OpenLayer(&file{b: b}, "it"); !errors.Is(err, snapshot.ErrFormat) {
			t.Errorf("%s: %v", name, err)
		}
	}
	f, _ := sampleLayer(t)
	reseal(f.b)
	if _, err := snapshot.OpenLayer(f, "it"); err != nil {
		t.Errorf("untouched: %v", err)
	}
}

// pattern is a layer whose data is one chunk over and over: it keeps the chunk, and what is not data.
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

// A layer larger than 4 GiB: its offsets do not fit 32 bits.
func TestLayerBeyond4GiB(t *testing.T) {
	const chunks = 4<<10 + 40
	p := &pattern{chunk: bytes.Repeat([]byte{1, 2, 3, 4}, snapshot.ChunkBytes/4), rest: map[int64][]byte{}}
	b := snapshot.NewLayerBuilder(snapshot.LayerInfo{MemoryBytes: 16 << 30, Base: snapshot.Digest{1}, Parent: snapshot.Digest{1}})
	const stride = 3 * snapshot.ChunkBytes / snapshot.PageSize // pages from chunk to chunk: up to 12 GiB
	for i := range uint64(chunks) {
		if err := b.Add(snapshot.RunData, i*stride, snapshot.ChunkBytes/snapshot.PageSize); err != nil {
			t.Fatal(err)
		}
		b.Runs[i].Sum = snapshot.Checksum(p.chunk)
	}
	if _, err := b.Finish(p); err != nil {
		t.Fatal(err)
	}
	l := open(t, p)
	if len(l.Runs) != chunks || l.Info.DataPages != chunks*snapshot.ChunkBytes/snapshot.PageSize {
		t.Fatalf("%d runs, %+v", len(l.Runs), l.Info)
	}
	last := l.Runs[chunks-1]
	if last.Page != (chunks-1)*stride || last.Offset != snapshot.PageSize+(chunks-1)*snapshot.ChunkBytes {
		t.Errorf("last run %+v", last)
	}
	data := make([]byte, last.Bytes())
	if err := l.ReadRun(last, data); err != nil || !bytes.Equal(data, p.chunk) {
		t.Errorf("last run: %v", err)
	}
}
