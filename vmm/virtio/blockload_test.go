package virtio

import (
	"bytes"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"torpor/vmm/cow"
	"torpor/vmm/guestmem"
	"torpor/vmm/ratelimit"
)

// gatedDisk lets writes of its gated sectors pass only when told, and notes what is done in which order.
type gatedDisk struct {
	disk
	gate map[int64]chan struct{} // by offset
	mu   sync.Mutex
	did  []string
}

func (d *gatedDisk) note(what string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.did = append(d.did, what)
}

func (d *gatedDisk) WriteV(bufs [][]byte, off int64) error {
	if gate := d.gate[off]; gate != nil {
		<-gate
	}
	defer d.note("write")
	return d.disk.WriteV(bufs, off)
}

func (d *gatedDisk) Flush() error {
	defer d.note("flush")
	return d.disk.Flush()
}

// A slow request keeps no other from being done; a pause waits for it, and for nothing that was not begun.
func TestBlockSlowRequestStarvesNobody(t *testing.T) {
	b := NewBlock(openDisk(t, true), "", false, nil)
	slow := &gatedDisk{disk: b.disk, gate: map[int64]chan struct{}{0: make(chan struct{})}}
	b.disk = slow
	d := start(t, b)
	held := d.add(0, d.in(blockHeader(1, 0)), d.in(pattern(4096, 1)), d.out(1))
	d.notify(0) // it comes alone
	for i := range 50 {
		if status, _, _ := d.block(1, uint64(8+i), pattern(512, byte(i)), 0); status != 0 {
			t.Fatalf("request %d beside a slow one: status %d", i, status)
		}
	}
	if status, _, _ := d.block(4, 0, nil, 0); status != 0 { // it covers what was answered, not the slow one
		t.Fatalf("flush beside a slow write: status %d", status)
	}
	paused := make(chan error)
	go func() { paused <- d.tr.Pause() }()
	select {
	case <-paused:
		t.Fatal("paused with a request in flight")
	case <-time.After(20 * time.Millisecond):
	}
	close(slow.gate[0])
	d.check(<-paused)
	d.check(d.tr.Resume())
	if head, _ := d.wait(0); head != held {
		t.Errorf("chain %d came back, want %d", head, held)
	}
}

// What was answered before a flush was made is in the layer when the flush is answered: with any number of others in flight.
func TestBlockFlushCoversWhatWasAnswered(t *testing.T) {
	top := filepath.Join(t.TempDir(), "top")
	if err := cow.Create(top, testDisk); err != nil {
		t.Fatal(err)
	}
	chain, err := cow.OpenChain("", nil, top)
	if err != nil {
		t.Fatal(err)
	}
	defer chain.Close()
	d := start(t, NewBlock(chain, "", false, nil))
	for i := range byte(20) {
		mark := d.next
		sector := uint64(i) * 16
		for j := range uint64(4) { // noise, unanswered
			d.add(0, d.in(blockHeader(1, sector+8+j)), d.in(pattern(512, i)), d.out(1))
		}
		if status, _, _ := d.blockAmong(1, sector, pattern(4096, i)); status != 0 {
			t.Fatalf("write %d: status %d", i, status)
		}
		if status, _, _ := d.blockAmong(4, 0, nil); status != 0 {
			t.Fatalf("flush %d: status %d", i, status)
		}
		raw, err := os.ReadFile(top) // what is left if the process dies now
		d.check(err)
		saved := filepath.Join(t.TempDir(), "copy")
		d.check(os.WriteFile(saved, raw, 0o600))
		c, err := cow.OpenChain("", []string{saved}, "")
		d.check(err)
		got := make([]byte, 4096)
		_, err = c.ReadAt(got, int64(sector)*512)
		d.check(err)
		c.Close()
		if !bytes.Equal(got, pattern(4096, i)) {
			t.Fatalf("write %d was answered, then a flush: it is not in the layer", i)
		}
		for len(d.queues[0].chains) > 0 {
			d.wait(0)
		}
		d.next = mark
	}
}

// blockAmong does one request while others are in flight and waits for that one.
func (d *driver) blockAmong(typ uint32, sector uint64, write []byte) (byte, []byte, uint32) {
	d.t.Helper()
	bufs := []buffer{d.in(blockHeader(typ, sector))}
	if write != nil {
		bufs = append(bufs, d.in(write))
	}
	status := d.out(1)
	d.check(d.mem.WriteAt([]byte{77}, status.at))
	head := d.add(0, append(bufs, status)...)
	d.notify(0)
	for {
		got, n := d.wait(0)
		if got == head {
			return d.bytes(status)[0], nil, n
		}
	}
}

// Write-zeroes keeps room unless the driver allows to unmap; a discard gives it back.
func TestBlockZeroesAndRoom(t *testing.T) {
	top := filepath.Join(t.TempDir(), "top")
	if err := cow.Create(top, testDisk); err != nil {
		t.Fatal(err)
	}
	chain, err := cow.OpenChain(testBase(t), nil, top)
	if err != nil {
		t.Fatal(err)
	}
	defer chain.Close()
	d := start(t, NewBlock(chain, "", false, nil))
	fill := func() {
		if status, _, _ := d.block(1, 0, pattern(256<<10, 9), 0); status != 0 {
			t.Fatalf("write: status %d", status)
		}
		d.flush()
	}
	for _, c := range []struct {
		name       string
		typ, flags uint32
		keeps      bool
	}{{"write-zeroes", 13, 0, true}, {"write-zeroes that may unmap", 13, 1, false}, {"discard", 11, 0, false}} {
		fill()
		before := allocated(t, top)
		if status, _, _ := d.block(c.typ, 0, ranges(0, 512, c.flags), 0); status != 0 {
			t.Fatalf("%s: status %d", c.name, status)
		}
		d.flush()
		if _, got, _ := d.block(0, 0, nil, 256<<10); !bytes.Equal(got, make([]byte, 256<<10)) {
			t.Errorf("%s: other bytes than zeros", c.name)
		}
		if after := allocated(t, top); (after >= before) != c.keeps {
			t.Errorf("%s: %d bytes on disk, %d before", c.name, after, before)
		}
	}
}

func (d *driver) flush() {
	d.t.Helper()
	if status, _, _ := d.block(4, 0, nil, 0); status != 0 {
		d.t.Fatalf("flush: status %d", status)
	}
}

func allocated(t *testing.T, path string) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

// One bad range spoils the whole request before any range is touched.
func TestBlockZeroesAllOrNothing(t *testing.T) {
	d := start(t, NewBlock(openDisk(t, true), "", false, nil))
	for name, second := range map[string][]byte{
		"flags": ranges(8, 8, 1<<31), "place": ranges(1<<60, 8, 0), "overflow": ranges(1<<64-1, 1<<32-1, 0), "length": ranges(0, 1<<20+1, 0),
	} {
		for _, typ := range []uint32{11, 13} {
			if status, _, _ := d.block(typ, 0, append(ranges(0, 8, 0), second...), 0); status == 0 {
				t.Errorf("%s: request %d passed", name, typ)
			}
		}
	}
	if status, got, _ := d.block(0, 0, nil, 4096); status != 0 || !bytes.Equal(got, pattern(4096, 1)) {
		t.Errorf("a refused request zeroed: status %d", status)
	}
}

// A full disk fails the writes that need room; reads, and writes in place, go on.
func TestBlockDiskFull(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=128k"); err != nil {
		t.Skipf("needs to mount a small file system: %v", err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	top := filepath.Join(dir, "top")
	if err := cow.Create(top, testDisk); err != nil {
		t.Fatal(err)
	}
	chain, err := cow.OpenChain(testBase(t), nil, top)
	if err != nil {
		t.Fatal(err)
	}
	defer chain.Close()
	d := start(t, NewBlock(chain, "", false, nil))
	if status, _, _ := d.block(1, 0, pattern(4096, 2), 0); status != 0 {
		t.Fatalf("write: status %d", status)
	}
	if status, _, _ := d.block(1, 64, pattern(512<<10, 3), 0); status != 1 {
		t.Errorf("a write that finds no room: status %d, want an I/O error", status)
	}
	if status, _, _ := d.block(1, 0, pattern(4096, 4), 0); status != 0 {
		t.Errorf("a write in place: status %d", status)
	}
	if status, got, _ := d.block(0, 0, nil, 64<<10); status != 0 || !bytes.Equal(got, append(pattern(4096, 4), pattern(testDisk, 1)[4096:64<<10]...)) {
		t.Errorf("a read: status %d, or other bytes", status)
	}
}

// Memory that the kernel cannot reach fails the one request, be its data on a layer, in the base or zero.
func TestBlockLostGuestMemory(t *testing.T) {
	path := filepath.Join(t.TempDir(), "mem")
	if err := os.WriteFile(path, make([]byte, testMemory), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := guestmem.MapPrivate(int(f.Fd()), 0, testMemory)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	defer guestmem.Unmap(raw)
	mem, err := guestmem.New([]guestmem.Region{{GPA: 0, Bytes: raw}})
	if err != nil {
		t.Fatal(err)
	}
	d := newDriver(t, NewBlock(openDisk(t, true), "", false, nil), mem)
	defer d.tr.Close()
	d.init()
	if status, _, _ := d.block(13, 0, ranges(0, 8, 0), 0); status != 0 {
		t.Fatal("write-zeroes")
	}
	if status, _, _ := d.block(1, 8, pattern(4096, 5), 0); status != 0 {
		t.Fatal("write")
	}
	if err := os.Truncate(path, testMemory/2); err != nil {
		t.Fatal(err)
	}
	lost := buffer{testMemory - 8192, 4096, true}
	for sector, what := range map[uint64]string{0: "zeros", 8: "a layer", 64: "the base"} {
		status := d.out(1)
		d.check(d.mem.WriteAt([]byte{77}, status.at))
		d.add(0, d.in(blockHeader(0, sector)), lost, status)
		d.notify(0)
		d.wait(0)
		if got := d.bytes(status)[0]; got != 1 {
			t.Errorf("read of %s to lost memory: status %d, want an I/O error", what, got)
		}
	}
	d.add(0, d.in(blockHeader(1, 8)), buffer{lost.at, lost.len, false}, d.out(1))
	d.notify(0)
	d.wait(0)
	if status, got, _ := d.block(0, 64, nil, 512); status != 0 || !bytes.Equal(got, pattern(testDisk, 1)[64*512:65*512]) {
		t.Errorf("the next request fails: status %d", status)
	}
}

// handClock is a clock that a test moves on; timers run out as it passes them.
type handClock struct {
	mu     sync.Mutex
	now    time.Duration
	timers []*handTimer
	set    atomic.Int32 // timers ever set
}

type handTimer struct {
	at   time.Duration
	f    func()
	done bool
}

func (c *handClock) Now() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *handClock) AfterFunc(d time.Duration, f func()) func() {
	c.mu.Lock()
	defer c.mu.Unlock()
	timer := &handTimer{at: c.now + d, f: f}
	c.timers = append(c.timers, timer)
	c.set.Add(1)
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		timer.done = true
	}
}

// move lets d pass and waits for what the timers in it do.
func (c *handClock) move(d time.Duration) {
	c.mu.Lock()
	c.now += d
	var due []func()
	for _, timer := range c.timers {
		if !timer.done && timer.at <= c.now {
			timer.done = true
			due = append(due, timer.f)
		}
	}
	c.mu.Unlock()
	for _, f := range due {
		f()
	}
}

// A limited disk does as many requests as it may, and then one for each time a token comes in. A pause does not wait for those
// that are held back, they are not lost, and the tokens go along into the machine that is restored.
func TestBlockLimit(t *testing.T) {
	limit := ratelimit.Limit{Ops: ratelimit.Bucket{Size: 4, Burst: 2, Refill: 4 * time.Second}}
	clock := &handClock{}
	disk := openDisk(t, true)
	block := func() *Block {
		l, err := ratelimit.New(limit, clock)
		if err != nil {
			t.Fatal(err)
		}
		return NewBlock(disk, "", false, l)
	}
	d := start(t, block())
	for i := range uint64(10) {
		d.add(0, d.in(blockHeader(0, i)), d.out(512), d.out(1))
	}
	d.notify(0)
	for range 6 { // a full bucket and the burst
		d.wait(0)
	}
	none := func() {
		t.Helper()
		if _, _, ok := d.poll(0); ok {
			t.Fatal("more is done than the limit allows")
		}
	}
	d.waitHeld(clock, 1)
	clock.move(time.Second - 1)
	none()
	clock.move(1)
	d.wait(0)
	d.waitHeld(clock, 2)
	none()
	d.check(d.tr.Pause()) // with three held back
	clock.move(time.Hour) // that is no time for the guest
	d = d.move(block())
	d.check(d.tr.Resume())
	d.waitHeld(clock, 3)
	none()
	for i := range int32(3) {
		clock.move(time.Second)
		d.wait(0)
		if i < 2 {
			d.waitHeld(clock, 4+i)
		}
		none()
	}
	// A reset does not fill the bucket.
	d.queues, d.next = nil, guestmem.PageSize
	d.init()
	d.add(0, d.in(blockHeader(0, 0)), d.out(512), d.out(1))
	d.notify(0)
	d.waitHeld(clock, 6)
	none()
}

// waitHeld waits until the disk has set its nth timer.
func (d *driver) waitHeld(clock *handClock, n int32) {
	d.t.Helper()
	for end := time.Now().Add(patience); clock.set.Load() < n; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			d.t.Fatalf("the disk set %d timers, want %d", clock.set.Load(), n)
		}
	}
}

// A state that is none is refused, by a disk with a limit and by one without.
func TestBlockLoadRefuses(t *testing.T) {
	limited, err := ratelimit.New(ratelimit.Limit{Ops: ratelimit.Bucket{Size: 1, Refill: 1}}, &handClock{})
	if err != nil {
		t.Fatal(err)
	}
	for _, limit := range []*ratelimit.Limiter{nil, limited} {
		if err := NewBlock(openDisk(t, true), "", false, limit).Load([]byte("none")); err == nil {
			t.Error("a state that is none was taken")
		}
	}
}
