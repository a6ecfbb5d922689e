package virtq_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"testing"

	"torpor/vmm/guestmem"
	"torpor/vmm/virtio/virtq"
)

const (
	size  = 8
	desc  = 0x1000
	avail = 0x2000
	used  = 0x3000
	bufs  = 0x4000
	limit = 0x8000

	tables = 0x6000 // indirect ones
)

func newMemory(t testing.TB) *guestmem.Memory {
	t.Helper()
	m, err := guestmem.New([]guestmem.Region{{GPA: 0, Bytes: make([]byte, limit)}})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// ring is a driver's view of a queue.
type ring struct {
	t   testing.TB
	m   *guestmem.Memory
	q   *virtq.Queue
	idx uint16
}

func newRing(t testing.TB, eventIdx bool) *ring {
	t.Helper()
	m := newMemory(t)
	q, err := virtq.New(m, virtq.Config{Size: size, Desc: desc, Avail: avail, Used: used}, virtq.Features{EventIdx: eventIdx, Indirect: true})
	if err != nil {
		t.Fatal(err)
	}
	return &ring{t: t, m: m, q: q}
}

func (r *ring) check(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *ring) desc(i int, at uint64, n uint32, flags, next uint16) {
	r.descIn(desc, i, at, n, flags, next)
}

func (r *ring) descIn(table uint64, i int, at uint64, n uint32, flags, next uint16) {
	b := binary.LittleEndian.AppendUint64(nil, at)
	b = binary.LittleEndian.AppendUint32(b, n)
	b = binary.LittleEndian.AppendUint16(b, flags)
	b = binary.LittleEndian.AppendUint16(b, next)
	r.check(r.m.WriteAt(b, table+uint64(16*i)))
}

// table makes an indirect table of one readable byte.
func (r *ring) table(next uint16) { r.descIn(tables, 0, bufs, 1, 0, next) }

func (r *ring) publish(heads ...uint16) {
	for _, h := range heads {
		r.check(r.m.WriteUint16(guestmem.Addr(avail+4+2*(r.idx%size)), h))
		r.idx++
	}
	r.check(r.m.StoreUint16(avail+2, r.idx))
}

func (r *ring) usedIdx() uint16 {
	idx, err := r.m.LoadUint16(used + 2)
	r.check(err)
	return idx
}

func TestNewValidates(t *testing.T) {
	m := newMemory(t)
	good := virtq.Config{Size: size, Desc: desc, Avail: avail, Used: used}
	for name, harm := range map[string]func(*virtq.Config){
		"no descriptors":         func(c *virtq.Config) { c.Size = 0 },
		"not a power of two":     func(c *virtq.Config) { c.Size = 12 },
		"too many":               func(c *virtq.Config) { c.Size = 65535 },
		"larger than memory":     func(c *virtq.Config) { c.Size = 32768 },
		"misaligned descriptors": func(c *virtq.Config) { c.Desc += 8 },
		"misaligned available":   func(c *virtq.Config) { c.Avail++ },
		"misaligned used":        func(c *virtq.Config) { c.Used += 2 },
		"descriptors outside":    func(c *virtq.Config) { c.Desc = limit - 16 },
		"available ring outside": func(c *virtq.Config) { c.Avail = limit },
		"used ring wraps":        func(c *virtq.Config) { c.Used = 1<<64 - 4 },
		"descriptors in the hole": func(c *virtq.Config) {
			c.Desc = 0xc0000000
		},
	} {
		c := good
		harm(&c)
		if _, err := virtq.New(m, c, virtq.Features{}); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if _, err := virtq.New(m, good, virtq.Features{}); err != nil {
		t.Error(err)
	}
}

func TestChains(t *testing.T) {
	r := newRing(t, false)
	r.check(r.m.WriteAt([]byte("hello world"), bufs))
	r.desc(3, bufs, 5, 1, 7)
	r.desc(7, bufs+5, 0, 1, 0) // empty ones are allowed
	r.desc(0, bufs+5, 6, 1, 2)
	r.desc(2, bufs+0x100, 2, 1|2, 1)
	r.desc(1, bufs+0x200, 4, 2, 0)
	r.publish(3)
	var c virtq.Chain
	ok, err := r.q.Pop(&c)
	r.check(err)
	if !ok || c.Head != 3 || c.ReadLen() != 11 || c.WriteLen() != 6 {
		t.Fatalf("%v, head %d, %d to read, %d to write", ok, c.Head, c.ReadLen(), c.WriteLen())
	}
	for _, span := range [][2]int{{0, 11}, {0, 5}, {4, 6}, {5, 11}, {10, 11}, {11, 11}} {
		p := make([]byte, span[1]-span[0])
		r.check(c.ReadAt(p, uint64(span[0])))
		if string(p) != "hello world"[span[0]:span[1]] {
			t.Errorf("bytes %v are %q", span, p)
		}
	}
	var writable [][2]uint64
	c.Writable(func(at uint64, n uint32) { writable = append(writable, [2]uint64{at, uint64(n)}) })
	if want := [][2]uint64{{bufs + 0x100, 2}, {bufs + 0x200, 4}}; !slices.Equal(writable, want) {
		t.Errorf("writable %x, want %x", writable, want)
	}
	r.check(c.WriteAt([]byte("abcde"), 1))
	p := make([]byte, 4)
	r.check(r.m.ReadAt(p, bufs+0x200))
	if string(p) != "bcde" {
		t.Errorf("written %q", p)
	}
	for _, off := range []uint64{9, 11, 12, 1 << 63, 1<<64 - 1} {
		if err := c.ReadAt(make([]byte, 3), off); !errors.Is(err, virtq.ErrShort) {
			t.Errorf("read at %d: %v", off, err)
		}
		if err := c.WriteAt(make([]byte, 7), off); !errors.Is(err, virtq.ErrShort) {
			t.Errorf("write at %d: %v", off, err)
		}
	}
	if ok, err := r.q.Pop(&c); ok || err != nil {
		t.Errorf("a second chain: %v, %v", ok, err)
	}
	r.check(r.q.Push(3, 6))
	var elem [8]byte
	r.check(r.m.ReadAt(elem[:], used+4))
	if r.usedIdx() != 1 || !bytes.Equal(elem[:], []byte{3, 0, 0, 0, 6, 0, 0, 0}) {
		t.Errorf("used index %d, element %x", r.usedIdx(), elem)
	}
}

// A chain may begin in the queue's table and go on in one of its own, whose order is that of its next fields.
func TestIndirectChains(t *testing.T) {
	r := newRing(t, false)
	r.check(r.m.WriteAt([]byte("hello world"), bufs))
	r.descIn(tables, 0, bufs+5, 1, 1, 2)
	r.descIn(tables, 2, bufs+6, 5, 1, 1)
	r.descIn(tables, 1, bufs+0x100, 4, 2, 7)
	r.desc(5, bufs, 5, 1, 6)
	r.desc(6, tables, 48, 4|2, 0) // its own direction does not count
	r.publish(5)
	var c virtq.Chain
	ok, err := r.q.Pop(&c)
	r.check(err)
	if !ok || c.Head != 5 || c.ReadLen() != 11 || c.WriteLen() != 4 {
		t.Fatalf("%v, head %d, %d to read, %d to write", ok, c.Head, c.ReadLen(), c.WriteLen())
	}
	p := make([]byte, 11)
	r.check(c.ReadAt(p, 0))
	if string(p) != "hello world" {
		t.Errorf("%q", p)
	}

	// A table as long as the queue, with one descriptor before it, which is the most there can be.
	for i := range size {
		r.descIn(tables, i, bufs, 1<<32-1, 1, uint16(i+1))
	}
	r.descIn(tables, size-1, bufs, 1<<32-1, 0, 0)
	r.desc(0, tables, 16*size, 4, 0)
	r.publish(0)
	if ok, err := r.q.Pop(&c); !ok || err != nil || c.ReadLen() != size*(1<<32-1) || c.WriteLen() != 0 {
		t.Errorf("%v, %v, %d bytes", ok, err, c.ReadLen())
	}
}

// A driver that did not negotiate them may not use them.
func TestIndirectUnasked(t *testing.T) {
	r := newRing(t, false)
	r.table(0)
	r.desc(0, tables, 16, 4, 0)
	r.publish(0)
	for _, asked := range []bool{true, false} {
		q, err := virtq.New(r.m, virtq.Config{Size: size, Desc: desc, Avail: avail, Used: used}, virtq.Features{Indirect: asked})
		r.check(err)
		var c virtq.Chain
		if ok, err := q.Pop(&c); ok != asked || errors.Is(err, virtq.ErrBroken) == asked {
			t.Errorf("asked for %v: %v, %v", asked, ok, err)
		}
	}
}

// Indices run through 65,535 and the ring's size many times.
func TestIndicesWrap(t *testing.T) {
	for _, eventIdx := range []bool{false, true} {
		r := newRing(t, eventIdx)
		r.desc(1, bufs, 1, 0, 0)
		var c virtq.Chain
		for i := range 1<<17 + 5 {
			r.publish(1)
			if ok, err := r.q.Pop(&c); !ok || err != nil {
				t.Fatalf("chain %d: %v, %v", i, ok, err)
			}
			r.check(r.q.Push(1, 0))
			if r.usedIdx() != uint16(i+1) {
				t.Fatalf("used index %d after %d chains", r.usedIdx(), i+1)
			}
			if more, err := r.q.AwaitMore(); more || err != nil {
				t.Fatalf("chain %d: %v, %v", i, more, err)
			}
		}
	}
}

func TestBrokenStaysBroken(t *testing.T) {
	for name, harm := range map[string]func(r *ring){
		"index too far":      func(r *ring) { r.idx = size; r.publish(0) },
		"index went back":    func(r *ring) { r.idx = 65534; r.publish(0) },
		"head outside":       func(r *ring) { r.publish(size) },
		"loop of one":        func(r *ring) { r.desc(0, bufs, 1, 1, 0); r.publish(0) },
		"loop of two":        func(r *ring) { r.desc(0, bufs, 1, 1, 1); r.desc(1, bufs, 1, 1, 0); r.publish(0) },
		"next outside":       func(r *ring) { r.desc(0, bufs, 1, 1, 500); r.publish(0) },
		"indirect, and more": func(r *ring) { r.table(0); r.desc(0, tables, 16, 4|1, 1); r.desc(1, bufs, 1, 0, 0); r.publish(0) },
		"empty table":        func(r *ring) { r.desc(0, tables, 0, 4, 0); r.publish(0) },
		"half a descriptor":  func(r *ring) { r.desc(0, tables, 24, 4, 0); r.publish(0) },
		"table too long":     func(r *ring) { r.desc(0, tables, 16*(size+1), 4, 0); r.publish(0) },
		"table outside":      func(r *ring) { r.desc(0, limit-8, 16, 4, 0); r.publish(0) },
		"table in a table": func(r *ring) {
			r.descIn(tables, 0, tables, 16, 4, 0)
			r.desc(0, tables, 16, 4, 0)
			r.publish(0)
		},
		"loop in a table": func(r *ring) {
			r.descIn(tables, 0, bufs, 1, 1, 1)
			r.descIn(tables, 1, bufs, 1, 1, 0)
			r.desc(0, tables, 32, 4, 0)
			r.publish(0)
		},
		"next outside of a table": func(r *ring) {
			r.descIn(tables, 0, bufs, 1, 1, 1)
			r.desc(0, tables, 16, 4, 0)
			r.publish(0)
		},
		"read in a table after write": func(r *ring) {
			r.table(0)
			r.desc(0, bufs, 1, 1|2, 1)
			r.desc(1, tables, 16, 4, 0)
			r.publish(0)
		},
		"write, then read": func(r *ring) { r.desc(0, bufs, 1, 3, 1); r.desc(1, bufs, 1, 0, 0); r.publish(0) },
	} {
		r := newRing(t, false)
		r.check(r.m.WriteAt(make([]byte, 256), tables))
		r.desc(0, bufs, 1, 0, 0)
		harm(r)
		var c virtq.Chain
		for range 2 {
			if ok, err := r.q.Pop(&c); ok || !errors.Is(err, virtq.ErrBroken) {
				t.Errorf("%s: %v, %v", name, ok, err)
			}
		}
		_, err := r.q.AwaitMore()
		if !errors.Is(err, virtq.ErrBroken) || !errors.Is(r.q.Push(0, 0), virtq.ErrBroken) {
			t.Errorf("%s: not broken for all calls", name)
		}
	}
}

// The longest chain there can be is no loop.
func TestLongestChain(t *testing.T) {
	r := newRing(t, false)
	for i := range size - 1 {
		r.desc(i, bufs, 1<<32-1, 1, uint16(i+1))
	}
	r.desc(size-1, bufs, 1<<32-1, 0, 0)
	r.publish(0)
	var c virtq.Chain
	if ok, err := r.q.Pop(&c); !ok || err != nil || c.ReadLen() != size*(1<<32-1) {
		t.Fatalf("%v, %v, %d bytes", ok, err, c.ReadLen())
	}
	var access *guestmem.AccessError
	if err := c.ReadAt(make([]byte, 2*limit), 0); !errors.As(err, &access) {
		t.Errorf("read beyond memory: %v", err)
	}
}

func TestInterruptSuppression(t *testing.T) {
	t.Run("flags", func(t *testing.T) {
		r := newRing(t, false)
		if !r.q.NeedsInterrupt() {
			t.Error("suppressed unasked")
		}
		r.check(r.m.StoreUint16(avail, 1))
		if r.q.NeedsInterrupt() {
			t.Error("not suppressed")
		}
	})
	t.Run("event index", func(t *testing.T) {
		const usedEvent = avail + 4 + 2*size
		r := newRing(t, true)
		r.q.SetState(virtq.State{LastAvail: 65533, NextUsed: 65533})
		want := []bool{true, false, false, true, false} // the first is not known to be unneeded
		r.check(r.m.StoreUint16(usedEvent, 0))          // with the one that makes the index 1
		for i, w := range want {
			r.check(r.q.Push(0, 0))
			if got := r.q.NeedsInterrupt(); got != w {
				t.Errorf("push %d: %v", i, got)
			}
		}
	})
}

func TestNotificationRequest(t *testing.T) {
	const availEvent = used + 4 + 8*size
	r := newRing(t, true)
	r.desc(0, bufs, 1, 0, 0)
	r.publish(0, 0, 0)
	var c virtq.Chain
	for range 2 {
		_, err := r.q.Pop(&c)
		r.check(err)
	}
	if more, err := r.q.AwaitMore(); !more || err != nil {
		t.Errorf("overlooked a chain: %v, %v", more, err)
	}
	if event, _ := r.m.LoadUint16(availEvent); event != 2 {
		t.Errorf("avail_event %d, want 2", event)
	}
	r.check(r.q.NotifyAt(3))
	if event, _ := r.m.LoadUint16(availEvent); event != 3 {
		t.Errorf("avail_event %d, want 3", event)
	}
}

func TestState(t *testing.T) {
	r := newRing(t, false)
	r.desc(0, bufs, 1, 0, 0)
	r.publish(0, 0)
	var c virtq.Chain
	_, err := r.q.Pop(&c)
	r.check(err)
	r.check(r.q.Push(0, 0))
	q, err := virtq.New(r.m, virtq.Config{Size: size, Desc: desc, Avail: avail, Used: used}, virtq.Features{})
	r.check(err)
	q.SetState(r.q.State())
	if ok, err := q.Pop(&c); !ok || err != nil {
		t.Fatalf("the second chain is gone: %v, %v", ok, err)
	}
	r.check(q.Push(0, 0))
	if r.usedIdx() != 2 {
		t.Errorf("used index %d", r.usedIdx())
	}
}

// What was popped and not pushed can be left for another time.
func TestUnpop(t *testing.T) {
	r := newRing(t, false)
	for i := range 3 {
		r.desc(i, bufs, 1, 0, 0)
	}
	r.publish(2, 0, 1)
	var c virtq.Chain
	for range 3 {
		_, err := r.q.Pop(&c)
		r.check(err)
	}
	r.q.Unpop(2)
	for _, want := range []uint16{0, 1} {
		if ok, err := r.q.Pop(&c); !ok || err != nil || c.Head != want {
			t.Fatalf("%v, %v, chain %d, want %d", ok, err, c.Head, want)
		}
	}
	if ok, err := r.q.Pop(&c); ok || err != nil {
		t.Fatalf("one more: %v, %v", ok, err)
	}
}

func TestPushAll(t *testing.T) {
	r := newRing(t, true)
	r.q.SetState(virtq.State{LastAvail: 65534, NextUsed: 65534})
	r.check(r.m.StoreUint16(avail+2, 65534))
	var want []virtq.Used
	for i := range uint16(size) {
		want = append(want, virtq.Used{Head: i, Written: 100 + uint32(i)})
	}
	r.check(r.q.PushAll(want...))
	if r.usedIdx() != 65534+size-65536 {
		t.Errorf("used index %d", r.usedIdx())
	}
	for i, u := range want {
		at := guestmem.Addr(used + 4 + 8*((65534+i)%size))
		head, err := r.m.ReadUint32(at)
		r.check(err)
		written, err := r.m.ReadUint32(at + 4)
		r.check(err)
		if head != uint32(u.Head) || written != u.Written {
			t.Errorf("entry %d: chain %d, %d bytes", i, head, written)
		}
	}
}

func TestSlices(t *testing.T) {
	r := newRing(t, false)
	r.check(r.m.WriteAt([]byte("hello world"), bufs))
	r.desc(0, bufs, 5, 1, 1)
	r.desc(1, 1<<40, 0, 1, 2) // empty: its address does not matter
	r.desc(2, bufs+5, 6, 1, 3)
	r.desc(3, bufs+0x100, 4, 2|1, 4)
	r.desc(4, limit-2, 2, 2, 0)
	r.publish(0)
	var c virtq.Chain
	_, err := r.q.Pop(&c)
	r.check(err)
	for off, want := range map[uint64]string{0: "hello| world", 3: "lo| world", 5: " world", 7: "orld", 11: ""} {
		got, err := c.AppendReadable(nil, off)
		if err != nil || string(bytes.Join(got, []byte("|"))) != want {
			t.Errorf("from %d: %q, %v", off, got, err)
		}
	}
	if _, err := c.AppendReadable(nil, 12); !errors.Is(err, virtq.ErrShort) {
		t.Errorf("from beyond the end: %v", err)
	}
	slices, err := c.AppendWritable([][]byte{nil}, 1)
	if err != nil || len(slices) != 3 || len(slices[1]) != 3 || len(slices[2]) != 2 {
		t.Fatalf("%d slices, %v", len(slices), err)
	}
	copy(slices[1], "abc")
	var got [4]byte
	r.check(r.m.ReadAt(got[:], bufs+0x100))
	if string(got[:]) != "\x00abc" {
		t.Errorf("wrote %q", got)
	}

	r.desc(5, bufs, 1, 1, 6)
	r.desc(6, limit-1, 2, 0, 0)
	r.publish(5)
	_, err = r.q.Pop(&c)
	r.check(err)
	var access *guestmem.AccessError
	if got, err := c.AppendReadable(nil, 0); !errors.As(err, &access) || len(got) > 1 {
		t.Errorf("beyond memory: %v, %v", got, err)
	}
}

// FuzzQueue lets the driver write anything into the rings: no panic, no chain longer than the queue, no endless supply.
func FuzzQueue(f *testing.F) {
	f.Add([]byte{}, uint16(0), true)
	f.Add([]byte{0, 0, 1, 0, 0, 0, 0, 0}, uint16(3), false)
	loop := make([]byte, 16*size+2*size)
	loop[12], loop[14] = 1, 0
	f.Add(loop, uint16(1), true)
	long := make([]byte, 16*size+2*size)
	for i := range size - 1 {
		long[16*i+12], long[16*i+14] = 1, byte(i+1)
	}
	f.Add(long, uint16(size), true)
	// An indirect table that is the second half of the queue's own, and one that is all of it, itself included.
	binary.LittleEndian.PutUint64(long, desc+16*size/2)
	long[8], long[12] = 16*size/2, 4
	f.Add(bytes.Clone(long), uint16(1), true)
	binary.LittleEndian.PutUint64(long, desc)
	long[8] = 16 * size
	f.Add(long, uint16(1), true)
	f.Fuzz(func(t *testing.T, tables []byte, idx uint16, eventIdx bool) {
		r := newRing(t, eventIdx)
		n := min(len(tables), 16*size)
		r.check(r.m.WriteAt(tables[:n], desc))
		r.check(r.m.WriteAt(tables[n:min(len(tables), n+2*size+2)], avail+4))
		r.check(r.m.StoreUint16(avail+2, idx))
		var c virtq.Chain
		popped := 0
		for {
			ok, err := r.q.Pop(&c)
			if !ok {
				if err != nil && !errors.Is(err, virtq.ErrBroken) {
					t.Fatal(err)
				}
				break
			}
			popped++
			descriptors := 0
			c.Writable(func(uint64, uint32) { descriptors++ })
			if descriptors > 2*size {
				t.Fatalf("%d descriptors in a chain", descriptors)
			}
			p := make([]byte, 64)
			_ = c.ReadAt(p[:min(c.ReadLen(), 64)], 0)
			if c.ReadAt(p, c.ReadLen()-32) == nil && c.ReadLen() >= 32 {
				t.Fatal("read past the end of a chain")
			}
			if err := r.q.Push(c.Head, 0); err != nil {
				t.Fatal(err)
			}
			r.q.NeedsInterrupt()
		}
		if popped > size {
			t.Fatalf("%d chains from a queue of %d", popped, size)
		}
	})
}

// BenchmarkRequest is what a queue adds to a request: a chain of header, data and status is taken, its header read, and given back.
func BenchmarkRequest(b *testing.B) {
	r := newRing(b, true)
	r.desc(0, bufs, 16, 1, 1)
	r.desc(1, bufs+0x100, 4096, 1|2, 2)
	r.desc(2, bufs+0x10, 1, 2, 0)
	var c virtq.Chain
	header := make([]byte, 16)
	b.ReportAllocs()
	for b.Loop() {
		r.publish(0)
		if ok, err := r.q.Pop(&c); !ok || err != nil {
			b.Fatal(ok, err)
		}
		if err := c.ReadAt(header, 0); err != nil {
			b.Fatal(err)
		}
		if err := r.q.Push(c.Head, 1); err != nil {
			b.Fatal(err)
		}
		r.q.NeedsInterrupt()
	}
}
