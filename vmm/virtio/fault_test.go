package virtio

import (
	"os"
	"testing"

	"torpor/vmm/guestmem"
)

const lostAt, lostBytes = testMemory, 16 * guestmem.PageSize

// lostMemory is testMemory bytes that are well, and behind them memory whose file was cut short.
func lostMemory(t *testing.T) *guestmem.Memory {
	t.Helper()
	b := mapFile(t, lostBytes)
	mem, err := guestmem.New([]guestmem.Region{{GPA: 0, Bytes: make([]byte, testMemory)}, {GPA: lostAt, Bytes: b.bytes}})
	if err != nil {
		t.Fatal(err)
	}
	b.lose()
	return mem
}

// fileMapping is memory from a file, as of a restored machine.
type fileMapping struct {
	t     *testing.T
	path  string
	bytes []byte
}

func mapFile(t *testing.T, size uint64) fileMapping {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "mem")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if err := f.Truncate(int64(size)); err != nil {
		t.Fatal(err)
	}
	b, err := guestmem.MapPrivate(int(f.Fd()), 0, size)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = guestmem.Unmap(b) })
	return fileMapping{t: t, path: f.Name(), bytes: b}
}

// lose takes the file away from under the mapping: each access is a SIGBUS from now on.
func (m fileMapping) lose() {
	m.t.Helper()
	if err := os.Truncate(m.path, 0); err != nil {
		m.t.Fatal(err)
	}
}

// A request whose buffer is on a page that cannot be read fails alone; the device, and the process, go on.
func TestBlockFailsOneRequestForALostPage(t *testing.T) {
	d := newDriver(t, NewBlock(openDisk(t, true), "", false, nil), lostMemory(t))
	d.init()
	for typ, b := range map[uint32]buffer{0: {lostAt, 512, true}, 1: {lostAt + 4096, 512, false}} {
		status := d.out(1)
		d.check(d.mem.WriteAt([]byte{77}, status.at))
		d.add(0, d.in(blockHeader(typ, 0)), b, status)
		d.notify(0)
		d.wait(0)
		if got := d.bytes(status)[0]; got != 1 {
			t.Errorf("request of type %d: status %d, want an I/O error", typ, got)
		}
	}
	if status, _, _ := d.block(0, 0, nil, 512); status != 0 {
		t.Errorf("the next request fails: status %d", status)
	}
}

// A queue that is itself on such a page costs its device a reset, no more.
func TestLostQueueNeedsReset(t *testing.T) {
	file := mapFile(t, testMemory)
	mem, err := guestmem.New([]guestmem.Region{{GPA: 0, Bytes: file.bytes}})
	if err != nil {
		t.Fatal(err)
	}
	d := newDriver(t, NewRNG(), mem)
	d.init()
	d.add(0, d.out(16))
	file.lose()
	d.notify(0)
	if !d.until(func() bool { return d.get(tStatus)&tNeedsReset != 0 }) {
		t.Error("the device goes on with a queue it cannot read")
	}
}
