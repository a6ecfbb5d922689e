package virtio

import (
	"bytes"
	"testing"
)

func TestRNGFillsBuffers(t *testing.T) {
	d := start(t, NewRNG())
	a, b := d.out(64), d.out(64)
	d.add(0, a, b)
	d.notify(0)
	if _, n := d.wait(0); n != 128 {
		t.Errorf("%d bytes, want 128", n)
	}
	zero := make([]byte, 64)
	if bytes.Equal(d.bytes(a), zero) || bytes.Equal(d.bytes(a), d.bytes(b)) {
		t.Error("not random")
	}
}

func TestRNGIsBounded(t *testing.T) {
	d := start(t, NewRNG())
	big := d.out(128 << 10)
	d.add(0, big)
	d.add(0, buffer{d.alloc(64 << 10), 1<<32 - 1, true})
	d.add(0, d.in([]byte{1}))
	d.notify(0)
	for _, want := range []uint32{64 << 10, 64 << 10, 0} {
		if _, n := d.wait(0); n != want {
			t.Errorf("%d bytes, want %d", n, want)
		}
	}
	if rest := d.bytes(big)[64<<10:]; !bytes.Equal(rest, make([]byte, len(rest))) {
		t.Error("more was written than claimed")
	}
}

func TestRNGSaveLoad(t *testing.T) {
	d := start(t, NewRNG())
	d.check(d.tr.Pause())
	d.add(0, d.out(16))
	d = d.move(NewRNG())
	d.check(d.tr.Resume())
	if _, n := d.wait(0); n != 16 {
		t.Errorf("%d bytes, want 16", n)
	}
}
