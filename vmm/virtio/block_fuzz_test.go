package virtio

import (
	"bytes"
	"testing"
)

// FuzzBlock does any one request and compares disk and answer with a flat array: what succeeds does what it says, what fails
// changes nothing, and nothing reaches beyond the disk.
func FuzzBlock(f *testing.F) {
	f.Add(uint32(0), uint64(0), []byte{}, uint16(512))
	f.Add(uint32(1), uint64(3), pattern(1024, 7), uint16(0))
	f.Add(uint32(1), uint64(testDisk/512-1), pattern(1024, 7), uint16(0))
	f.Add(uint32(4), uint64(0), []byte{}, uint16(0))
	f.Add(uint32(8), uint64(0), []byte{}, uint16(20))
	f.Add(uint32(8), uint64(0), []byte{}, uint16(3))
	f.Add(uint32(11), uint64(0), append(ranges(8, 16, 0), ranges(1, 3, 0)...), uint16(0))
	f.Add(uint32(13), uint64(0), append(ranges(8, 16, 1), ranges(1<<63, 1<<31, 0)...), uint16(0))
	f.Add(uint32(13), uint64(0), ranges(5, 1<<32-1, 2), uint16(0))
	f.Add(uint32(99), uint64(1<<64-1), []byte{1}, uint16(65535))
	base := pattern(testDisk, 1)
	f.Fuzz(func(t *testing.T, typ uint32, sector uint64, write []byte, read uint16) {
		write = write[:min(len(write), 64<<10)]
		disk := openDisk(t, true)
		d := start(t, NewBlock(disk, "fuzz", false, nil))
		defer d.tr.Close()
		status, got, used := d.block(typ, sector, write, uint32(read))
		want := bytes.Clone(base)
		at, sectors := int(min(sector, testDisk/512))*512, uint64(testDisk/512)
		fits := func(s, n uint64) bool { return s <= sectors && n <= sectors-s }
		ok := false
		switch typ {
		case 0:
			if ok = read%512 == 0 && fits(sector, uint64(read)/512); ok && !bytes.Equal(got, base[at:at+int(read)]) {
				t.Error("reads other bytes")
			}
		case 1:
			if ok = len(write)%512 == 0 && fits(sector, uint64(len(write))/512); ok {
				copy(want[at:], write)
			}
		case 4:
			ok = true
		case 8:
			if ok = true; !bytes.HasPrefix(append([]byte("fuzz"), make([]byte, 16)...), got[:min(len(got), 20)]) {
				t.Errorf("is called %q", got)
			}
		case 11, 13:
			ok = zeroModel(want, typ, write, fits)
		}
		if (status == 0) != ok || status > 2 {
			t.Errorf("request %d: status %d, which should succeed: %v", typ, status, ok)
		}
		if ok && typ == 0 && used != uint32(read)+1 {
			t.Errorf("request %d says it wrote %d bytes", typ, used)
		}
		now := make([]byte, testDisk)
		if _, err := disk.ReadAt(now, 0); err != nil || !bytes.Equal(now, want) {
			t.Errorf("request %d left other bytes on the disk: %v", typ, err)
		}
	})
}

// zeroModel zeroes the ranges in want if the request is a good one.
func zeroModel(want []byte, typ uint32, raw []byte, fits func(s, n uint64) bool) bool {
	if len(raw) == 0 || len(raw)%16 != 0 || len(raw) > 256 {
		return false
	}
	type span struct{ sector, n uint64 }
	var spans []span
	for ; len(raw) > 0; raw = raw[16:] {
		var v [16]uint64
		for i := range v {
			v[i] = uint64(raw[i])
		}
		le := func(from, to int) (n uint64) {
			for i := to - 1; i >= from; i-- {
				n = n<<8 | v[i]
			}
			return n
		}
		sector, n, flags := le(0, 8), le(8, 12), le(12, 16)
		if flags > 1 || flags == 1 && typ == 11 || n > 1<<20 || !fits(sector, n) {
			return false
		}
		spans = append(spans, span{sector, n})
	}
	for _, s := range spans {
		clear(want[s.sector*512 : (s.sector+s.n)*512])
	}
	return true
}
