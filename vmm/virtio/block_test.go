package virtio

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"

	"torpor/vmm/cow"
)

const testDisk = 1 << 20

// testBase is the image every disk here begins with.
func testBase(t testing.TB) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "base")
	if err := os.WriteFile(path, pattern(testDisk, 1), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func openDisk(t testing.TB, writable bool) *cow.Chain {
	t.Helper()
	top := ""
	if writable {
		top = filepath.Join(t.TempDir(), "top")
		if err := cow.Create(top, testDisk); err != nil {
			t.Fatal(err)
		}
	}
	chain, err := cow.OpenChain(testBase(t), nil, top)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { chain.Close() })
	return chain
}

func blockHeader(typ uint32, sector uint64) []byte {
	b := binary.LittleEndian.AppendUint32(nil, typ)
	b = binary.LittleEndian.AppendUint32(b, 0)
	return binary.LittleEndian.AppendUint64(b, sector)
}

// block does one request and returns its status, the data read, and the length the device claimed.
func (d *driver) block(typ uint32, sector uint64, write []byte, read uint32) (byte, []byte, uint32) {
	d.t.Helper()
	mark := d.next
	defer func() { d.next = mark }()
	bufs := []buffer{d.in(blockHeader(typ, sector))}
	if write != nil {
		bufs = append(bufs, d.in(write))
	}
	data := d.out(read)
	if read > 0 {
		bufs = append(bufs, data)
	}
	status := d.out(1)
	d.add(0, append(bufs, status)...)
	d.notify(0)
	_, n := d.wait(0)
	return d.bytes(status)[0], d.bytes(data), n
}

func TestBlockReadsAndWrites(t *testing.T) {
	d := start(t, NewBlock(openDisk(t, true), "disk0", false, nil))
	want := pattern(testDisk, 1)
	check := func(sector uint64, n uint32) {
		t.Helper()
		status, got, used := d.block(0, sector, nil, n)
		if status != 0 || used != n+1 || !bytes.Equal(got, want[sector*512:sector*512+uint64(n)]) {
			t.Fatalf("read of %d bytes at sector %d: status %d, used length %d, or other bytes", n, sector, status, used)
		}
	}
	check(0, 512)
	check(1, 300<<10)
	for i, w := range []struct {
		sector uint64
		n      int
	}{{3, 512}, {0, 4096}, {5, 200 << 10}, {2047, 512}} {
		p := pattern(w.n, byte(i+10))
		if status, _, used := d.block(1, w.sector, p, 0); status != 0 || used != 1 {
			t.Fatalf("write %d: status %d, used length %d", i, status, used)
		}
		copy(want[w.sector*512:], p)
		check(0, 300<<10)
		check(w.sector, uint32(w.n))
	}
	if status, _, _ := d.block(4, 0, nil, 0); status != 0 {
		t.Fatalf("flush: status %d", status)
	}
	if status, id, used := d.block(8, 0, nil, 20); status != 0 || used != 21 || string(bytes.TrimRight(id, "\x00")) != "disk0" {
		t.Fatalf("id: status %d, %q", status, id)
	}
}

// The longest request a driver may make lies in a table of its own: as many pieces as it is told, with header and status as many
// descriptors as the queue has.
func TestBlockLongestRequest(t *testing.T) {
	d := start(t, NewBlock(openDisk(t, true), "", false, nil))
	const piece = 4096
	pieces := int(d.get(tConfig + 12)) // seg_max
	if pieces != 254 {
		t.Fatalf("seg_max %d", pieces)
	}
	data, status := d.alloc(uint64(pieces*piece)), d.out(1)
	for _, writes := range []bool{false, true} {
		request := buffer{d.alloc(16), 16, false}
		d.check(d.mem.WriteAt(blockHeader(map[bool]uint32{true: 1}[writes], 0), request.at))
		descs := []buffer{request}
		for i := range pieces { // each behind the next one
			descs = append(descs, buffer{data + uint64((pieces-1-i)*piece), piece, !writes})
		}
		var table []byte
		for i, b := range append(descs, status) {
			table = binary.LittleEndian.AppendUint64(table, b.at)
			table = binary.LittleEndian.AppendUint32(table, b.len)
			flags := uint16(1)
			if b.writable {
				flags |= 2
			}
			if i == pieces+1 {
				flags &^= 1
			}
			table = binary.LittleEndian.AppendUint16(table, flags)
			table = binary.LittleEndian.AppendUint16(table, uint16(i+1))
		}
		d.check(d.mem.WriteAt([]byte{77}, status.at))
		d.writeDesc(0, 200, d.in(table), 4, 0)
		d.publish(0, 200)
		d.notify(0)
		if head, _ := d.wait(0); head != 200 || d.bytes(status)[0] != 0 {
			t.Fatalf("writes %v: chain %d, status %d", writes, head, d.bytes(status)[0])
		}
		got := make([]byte, pieces*piece)
		d.check(d.mem.ReadAt(got, data))
		for i, want := 0, pattern(testDisk, 1); i < pieces; i++ {
			if !bytes.Equal(got[(pieces-1-i)*piece:(pieces-i)*piece], want[i*piece:(i+1)*piece]) {
				t.Fatalf("writes %v: piece %d has other bytes", writes, i)
			}
		}
	}
	if _, got, _ := d.block(0, 0, nil, 1<<19); !bytes.Equal(got, pattern(testDisk, 1)[:1<<19]) {
		t.Error("what was written is not what is there")
	}
}

func ranges(sector uint64, n, flags uint32) []byte {
	b := binary.LittleEndian.AppendUint64(nil, sector)
	b = binary.LittleEndian.AppendUint32(b, n)
	return binary.LittleEndian.AppendUint32(b, flags)
}

func TestBlockZeroes(t *testing.T) {
	d := start(t, NewBlock(openDisk(t, true), "", false, nil))
	want := pattern(testDisk, 1)
	for _, r := range []struct {
		typ, flags uint32
		sector     uint64
		n          uint32
	}{{11, 0, 8, 16}, {13, 0, 1, 3}, {13, 1, 100, 777}} {
		status, _, _ := d.block(r.typ, 0, append(ranges(r.sector, r.n, r.flags), ranges(2000, 1, 0)...), 0)
		if status != 0 {
			t.Fatalf("request %d: status %d", r.typ, status)
		}
		clear(want[r.sector*512 : (r.sector+uint64(r.n))*512])
	}
	clear(want[2000*512 : 2001*512])
	if _, got, _ := d.block(0, 0, nil, testDisk/2); !bytes.Equal(got, want[:testDisk/2]) {
		t.Fatal("other bytes than zeros, or elsewhere")
	}
	if _, got, _ := d.block(0, 1024, nil, testDisk/2); !bytes.Equal(got, want[testDisk/2:]) {
		t.Fatal("other bytes than zeros, or elsewhere")
	}
}

func TestBlockRefusesBadRequestsAndGoesOn(t *testing.T) {
	const ioErr, unsupported = 1, 2
	for _, c := range []struct {
		name     string
		readOnly bool
		typ      uint32
		sector   uint64
		write    []byte
		read     uint32
		want     byte
	}{
		{"unknown type", false, 99, 0, nil, 512, unsupported},
		{"read past the end", false, 0, testDisk / 512, nil, 512, ioErr},
		{"read across the end", false, 0, testDisk/512 - 1, nil, 1024, ioErr},
		{"sector wraps", false, 0, 1<<64 - 1, nil, 1024, ioErr},
		{"sector in bytes wraps", false, 0, 1 << 55, nil, 512, ioErr},
		{"half a sector", false, 0, 0, nil, 100, ioErr},
		{"write of half a sector", false, 1, 0, make([]byte, 100), 0, ioErr},
		{"write past the end", false, 1, testDisk / 512, make([]byte, 512), 0, ioErr},
		{"write to a read-only disk", true, 1, 0, make([]byte, 512), 0, ioErr},
		{"discard on a read-only disk", true, 11, 0, ranges(0, 8, 0), 0, unsupported},
		{"write-zeroes on a read-only disk", true, 13, 0, ranges(0, 8, 0), 0, unsupported},
		{"discard with flags", false, 11, 0, ranges(0, 8, 1), 0, unsupported},
		{"write-zeroes with unknown flags", false, 13, 0, ranges(0, 8, 3), 0, unsupported},
		{"write-zeroes of more than is allowed", false, 13, 0, ranges(0, 1<<20+1, 0), 0, ioErr},
		{"write-zeroes past the end", false, 13, 0, ranges(testDisk/512-1, 2, 1), 0, ioErr},
		{"discard without ranges", false, 11, 0, nil, 0, ioErr},
		{"discard of half a range", false, 11, 0, make([]byte, 8), 0, ioErr},
		{"discard past the end", false, 11, 0, ranges(1<<40, 8, 0), 0, ioErr},
		{"too many ranges", false, 11, 0, make([]byte, 17*16), 0, ioErr},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := start(t, NewBlock(openDisk(t, true), "", c.readOnly, nil))
			if status, _, _ := d.block(c.typ, c.sector, c.write, c.read); status != c.want {
				t.Errorf("status %d, want %d", status, c.want)
			}
			if status, got, _ := d.block(0, 0, nil, 4096); status != 0 || !bytes.Equal(got, pattern(4096, 1)) {
				t.Errorf("the next request fails: status %d", status)
			}
		})
	}
}

func TestBlockFailsOneRequestForABadAddress(t *testing.T) {
	d := start(t, NewBlock(openDisk(t, true), "", false, nil))
	for _, b := range []buffer{
		{testMemory - 256, 512, true},
		{1 << 63, 512, true},
		{1<<64 - 256, 512, true},
		{0, 1 << 31, true},
	} {
		status := d.out(1)
		d.check(d.mem.WriteAt([]byte{77}, status.at))
		d.add(0, d.in(blockHeader(0, 0)), b, status)
		d.notify(0)
		d.wait(0)
		if got := d.bytes(status)[0]; got != 1 {
			t.Errorf("buffer %+v: status %d, want an I/O error", b, got)
		}
	}
	// Chains that cannot carry an answer come back as they are.
	d.add(0, d.in(blockHeader(0, 0)))
	d.add(0, d.in([]byte{1, 2, 3}), d.out(1))
	d.notify(0)
	d.wait(0)
	d.wait(0)
	if status, _, _ := d.block(0, 0, nil, 512); status != 0 {
		t.Errorf("the next request fails: status %d", status)
	}
}

func TestBlockConfig(t *testing.T) {
	d := newDriver(t, NewBlock(openDisk(t, false), "", false, nil), newMemory(t, testMemory))
	if got := d.get(tConfig); got != testDisk/512 {
		t.Errorf("capacity %d", got)
	}
	var whole [512]byte
	d.tr.Read(tConfig, whole[:])
	d.set(tDeviceSelect, 0)
	if d.get(tDeviceFeatures)&(1<<5) == 0 {
		t.Error("a chain without a top is not offered as read-only")
	}
	d.set(tConfig, 1)
	if got := d.get(tConfig); got != testDisk/512 {
		t.Errorf("capacity %d after the guest wrote it", got)
	}
}

// A pause waits for requests in flight; what comes during it is done after it, here and in a machine restored from it.
func TestBlockPauseSaveLoad(t *testing.T) {
	disk := openDisk(t, true)
	d := start(t, NewBlock(disk, "", false, nil))
	for cycle := range 5 {
		for i := range 8 {
			d.add(0, d.in(blockHeader(1, uint64(i*8))), d.in(pattern(4096, byte(cycle*8+i))), d.out(1))
		}
		d.notify(0)
		d.check(d.tr.Pause())
		status := d.out(1)
		d.add(0, d.in(blockHeader(4, 0)), status)
		d.notify(0)
		if cycle%2 == 0 {
			d = d.move(NewBlock(disk, "", false, nil))
		}
		d.check(d.tr.Resume())
		for range 9 {
			d.wait(0)
		}
		for i := range 8 {
			if _, got, _ := d.block(0, uint64(i*8), nil, 4096); !bytes.Equal(got, pattern(4096, byte(cycle*8+i))) {
				t.Fatalf("cycle %d: block %d has other bytes", cycle, i)
			}
		}
	}
}
