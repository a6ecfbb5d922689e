package virtio

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"reflect"
	"slices"
	"testing"
	"time"

	"torpor/vmm/guestmem"
)

const (
	balloonInflateQ, balloonDeflateQ, balloonReportQ = 0, 1, 3

	// The pages of the tests begin behind what the driver's queues and buffers take.
	firstPage = 64
	testPages = testMemory / BalloonPage
)

// startBalloon is a balloon with everything negotiated, in memory where every page from firstPage on says 9.
func startBalloon(t testing.TB) (*driver, *Balloon) {
	t.Helper()
	mem := sharedMemory(t)
	b := NewBalloon(mem, true)
	d := newDriver(t, b, mem)
	d.init()
	fillPages(d)
	return d, b
}

func fillPages(d *driver) {
	d.check(d.mem.WriteAt(bytes.Repeat([]byte{9}, (testPages-firstPage)*BalloonPage), firstPage*BalloonPage))
}

// goneFrom lists the pages that no longer say 9, as runs {first, number}.
func goneFrom(d *driver) (runs [][2]uint64) {
	for page := uint64(firstPage); page < testPages; page++ {
		p := d.bytes(buffer{at: guestmem.Addr(page * BalloonPage), len: BalloonPage})
		switch {
		case bytes.Equal(p, bytes.Repeat([]byte{9}, BalloonPage)):
		case !bytes.Equal(p, make([]byte, BalloonPage)):
			d.t.Errorf("page %d is neither kept nor gone", page)
		case len(runs) > 0 && runs[len(runs)-1][0]+runs[len(runs)-1][1] == page:
			runs[len(runs)-1][1]++
		default:
			runs = append(runs, [2]uint64{page, 1})
		}
	}
	return runs
}

func pageNumbers(pages ...uint32) (raw []byte) {
	for _, p := range pages {
		raw = binary.LittleEndian.AppendUint32(raw, p)
	}
	return raw
}

func TestBalloonInflates(t *testing.T) {
	for _, c := range []struct {
		name  string
		pages []byte
		want  [][2]uint64
	}{
		{"nothing", nil, nil},
		{"one", pageNumbers(100), [][2]uint64{{100, 1}}},
		{"a run and others, in disorder, some twice", pageNumbers(200, 102, 101, 100, 300, 200, 101), [][2]uint64{{100, 3}, {200, 1}, {300, 1}}},
		{"not a whole number at the end", append(pageNumbers(100), 101, 0, 0), [][2]uint64{{100, 1}}},
		{"the last, and what is behind it", pageNumbers(testPages-1, testPages, testPages+1), [][2]uint64{{testPages - 1, 1}}},
		{"no memory at all", pageNumbers(testPages, 0xfee00, 1<<31, 1<<32-1), nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			d, b := startBalloon(t)
			d.add(balloonInflateQ, d.in(c.pages))
			d.notify(balloonInflateQ)
			if _, n := d.wait(balloonInflateQ); n != 0 {
				t.Errorf("%d bytes written", n)
			}
			if got := goneFrom(d); !slices.Equal(got, c.want) {
				t.Errorf("gone are %v, want %v", got, c.want)
			}
			want := uint64(0)
			for _, run := range c.want {
				want += run[1] * BalloonPage
			}
			if got := b.Status().Discarded; got != want {
				t.Errorf("%d bytes discarded, want %d", got, want)
			}
			// They come back by being touched, whether the driver says so or not.
			d.add(balloonDeflateQ, d.in(c.pages))
			d.notify(balloonDeflateQ)
			d.wait(balloonDeflateQ)
			fillPages(d)
			if got := goneFrom(d); got != nil {
				t.Errorf("gone are %v after deflating", got)
			}
		})
	}
}

func TestBalloonPageRuns(t *testing.T) {
	const last = 1<<32 - 1
	for _, c := range []struct {
		pages []uint32
		want  [][2]uint64
	}{
		{nil, nil},
		{[]uint32{5, 4, 3, 3, 7, 8}, [][2]uint64{{3, 3}, {7, 2}}},
		{[]uint32{last, 0, last - 1, last}, [][2]uint64{{0, 1}, {last - 1, 2}}},
	} {
		var got [][2]uint64
		pageRuns(slices.Clone(c.pages), func(first, n uint64) { got = append(got, [2]uint64{first, n}) })
		if !slices.Equal(got, c.want) {
			t.Errorf("runs of %v are %v, want %v", c.pages, got, c.want)
		}
	}
}

// However long a request says it is, a bounded part of it is done; the rest stays with the guest.
func TestBalloonRequestsAreBounded(t *testing.T) {
	d, b := startBalloon(t)
	long := pageNumbers(slices.Repeat([]uint32{100}, balloonMaxPages)...)
	d.add(balloonInflateQ, d.in(append(long, pageNumbers(200)...)))
	huge := buffer{at: firstPage * BalloonPage, len: 1<<32 - 1} // mostly outside memory, but its beginning says page 0x09090909
	d.add(balloonInflateQ, huge, huge, huge)
	d.notify(balloonInflateQ)
	d.wait(balloonInflateQ)
	d.wait(balloonInflateQ)
	if got, want := goneFrom(d), [][2]uint64{{100, 1}}; !slices.Equal(got, want) {
		t.Errorf("gone are %v, want %v", got, want)
	}
	if got := b.Status().Discarded; got != 4*BalloonPage {
		t.Errorf("%d bytes discarded: page 100 is in four batches", got)
	}
}

func TestBalloonTakesReportedRanges(t *testing.T) {
	d, _ := startBalloon(t)
	at := func(page, off int) guestmem.Addr { return guestmem.Addr(page*BalloonPage + off) }
	d.add(
		balloonReportQ,
		buffer{at(100, 0), 16 * BalloonPage, true},
		buffer{at(200, 1), 3*BalloonPage - 2, true},        // one whole page
		buffer{at(300, 0), 100, true},                      // none
		buffer{at(testPages-2, 0), 1<<32 - 1, true},        // as far as there is memory
		buffer{guestmem.Addr(1<<63 + 5), 1<<32 - 1, true},  // nowhere
		buffer{^guestmem.Addr(0) - 100, 1<<32 - 1, true},   // round the corner
		buffer{guestmem.Addr(testMemory), 1<<32 - 1, true}, // just behind
	)
	d.notify(balloonReportQ)
	d.wait(balloonReportQ)
	if got, want := goneFrom(d), [][2]uint64{{100, 16}, {201, 1}, {testPages - 2, 2}}; !slices.Equal(got, want) {
		t.Errorf("gone are %v, want %v", got, want)
	}
}

// What lies beside guest memory in our address space is none of the guest's.
func TestBalloonNeverLeavesGuestMemory(t *testing.T) {
	whole, err := guestmem.MapAnon(3 * testMemory)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { guestmem.Unmap(whole) })
	for i := range whole {
		whole[i] = 9
	}
	const gpa = 16 << 20
	mem, err := guestmem.New([]guestmem.Region{
		{GPA: gpa, Bytes: whole[testMemory : 2*testMemory]}, {GPA: 0, Bytes: make([]byte, 1<<20)},
	})
	if err != nil {
		t.Fatal(err)
	}
	d := newDriver(t, NewBalloon(mem, true), mem)
	d.init()
	var pages []uint32
	for page := uint32(gpa/BalloonPage - 2*testPages); page < gpa/BalloonPage+3*testPages; page++ {
		pages = append(pages, page)
	}
	for part := range slices.Chunk(pages, balloonMaxPages) {
		d.add(balloonInflateQ, d.in(pageNumbers(part...)))
	}
	d.add(balloonReportQ, buffer{gpa - testMemory, 3 * testMemory, true})
	d.notify(balloonInflateQ)
	d.notify(balloonReportQ)
	d.wait(balloonInflateQ)
	d.wait(balloonReportQ)
	for i, v := range whole {
		if inside := i >= testMemory && i < 2*testMemory; (v == 0) != inside {
			t.Fatalf("byte %d beside a guest's %d has %d", i, testMemory, v)
		}
	}
}

// A driver that does not take a feature has no queue for it, and the others move up.
func TestBalloonWithFewerFeatures(t *testing.T) {
	for _, c := range []struct {
		without uint32
		queues  []int // inflate, deflate, statistics, reporting; -1: none
	}{
		{balloonStatsVQ, []int{0, 1, -1, 2}},
		{balloonReporting, []int{0, 1, 2, -1}},
		{balloonStatsVQ | balloonReporting, []int{0, 1, -1, -1}},
		{balloonDeflateOnOOM, []int{0, 1, 2, 3}},
	} {
		mem := sharedMemory(t)
		b := NewBalloon(mem, true)
		d := newDriver(t, b, mem)
		d.negotiate()
		d.set(tStatus, 0)
		d.set(tStatus, 1)
		d.set(tStatus, 1|2)
		d.set(tDriverSelect, 0)
		d.set(tDeviceSelect, 0)
		d.set(tDriverFeatures, d.get(tDeviceFeatures)&^c.without)
		d.set(tDriverSelect, 1)
		d.set(tDriverFeatures, 1)
		d.set(tStatus, 1|2|8)
		for i := range 4 - bitsSet(c.without&(balloonStatsVQ|balloonReporting)) {
			d.set(tQueueSelect, uint32(i))
			d.addQueue(balloonQueueSize)
		}
		d.set(tStatus, 1|2|8|4)
		if s := d.get(tStatus); s != 15 {
			t.Fatalf("without %#x: status %#x", c.without, s)
		}
		fillPages(d)
		reborn := NewBalloon(mem, true)
		for range 2 {
			d.add(c.queues[0], d.in(pageNumbers(100)))
			d.notify(c.queues[0])
			d.wait(c.queues[0])
			want := [][2]uint64{{100, 1}}
			if q := c.queues[3]; q >= 0 {
				d.add(q, buffer{200 * BalloonPage, BalloonPage, true})
				d.notify(q)
				d.wait(q)
				want = append(want, [2]uint64{200, 1})
			}
			if got := goneFrom(d); !slices.Equal(got, want) {
				t.Errorf("without %#x: gone are %v, want %v", c.without, got, want)
			}
			if err := b.Refresh(canceled(t)); !errors.Is(err, ErrNoStatistics) {
				t.Errorf("without %#x: %v", c.without, err)
			}
			// The same on the other side of a snapshot.
			d.check(d.tr.Pause())
			if b == reborn {
				break
			}
			d = d.move(reborn)
			b = reborn
			d.check(d.tr.Resume())
			fillPages(d)
		}
	}
}

func bitsSet(v uint32) (n int) {
	for ; v != 0; v &= v - 1 {
		n++
	}
	return n
}

func canceled(t *testing.T) context.Context {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx
}

func TestBalloonTarget(t *testing.T) {
	mem := sharedMemory(t)
	b := NewBalloon(mem, false)
	d := newDriver(t, b, mem)
	b.SetTarget(5*BalloonPage + 1) // before there is a driver
	d.init()
	target := func(want uint32, told bool) {
		t.Helper()
		if got := d.get(tConfig); got != want {
			t.Errorf("num_pages is %d, want %d", got, want)
		}
		if status := d.get(tInterrupt); (status&2 != 0) != told {
			t.Errorf("interrupt status %d, want it told: %v", status, told)
		}
		d.set(tAck, 3)
	}
	target(5, true)
	b.SetTarget(7 * BalloonPage)
	target(7, true)
	target(7, false)

	d.set(tConfig+4, 3) // actual
	d.set(tConfig, 99)  // not the driver's to write
	if s := b.Status(); s.Target != 7*BalloonPage || s.Actual != 3*BalloonPage || d.get(tConfig) != 7 || d.get(tConfig+4) != 3 {
		t.Errorf("status %+v, config %d %d", s, d.get(tConfig), d.get(tConfig+4))
	}
	for _, odd := range []struct {
		off uint64
		p   []byte
	}{{tConfig + 4, []byte{9}}, {tConfig + 5, make([]byte, 4)}, {tConfig + 3, make([]byte, 8)}, {tConfig + 8, make([]byte, 4)}, {0xffc, make([]byte, 4)}} {
		d.tr.Write(odd.off, odd.p)
		d.tr.Read(odd.off, odd.p)
	}
	if s := b.Status(); s.Actual != 3*BalloonPage {
		t.Errorf("an odd write changed the actual size to %d", s.Actual)
	}

	// Set during a pause, it is told afterwards; and after a restore in any case.
	d.check(d.tr.Pause())
	b.SetTarget(8 * BalloonPage)
	target(8, false)
	d.check(d.tr.Resume())
	target(8, true)
	d.check(d.tr.Pause())
	b.SetTarget(9 * BalloonPage)
	b = NewBalloon(mem, false)
	d = d.move(b)
	target(9, false)
	d.check(d.tr.Resume())
	target(9, true)
	if s := b.Status(); s.Actual != 3*BalloonPage {
		t.Errorf("restored with %d bytes in it", s.Actual)
	}
	d.set(tStatus, 0)
	if s := b.Status(); s.Target != 9*BalloonPage || s.Actual != 0 {
		t.Errorf("after a reset: %+v", s)
	}
}

func statsBuffer(pairs ...uint64) (raw []byte) {
	for p := range slices.Chunk(pairs, 2) {
		raw = binary.LittleEndian.AppendUint16(raw, uint16(p[0]))
		raw = binary.LittleEndian.AppendUint64(raw, p[1])
	}
	return raw
}

// answer is a driver that gives statistics once when it is asked, by a buffer that came back.
func (d *driver) answerStats(raw []byte) {
	d.t.Helper()
	d.wait(statsQueue)
	d.add(statsQueue, d.in(raw))
	d.notify(statsQueue)
}

func TestBalloonStatistics(t *testing.T) {
	d, b := startBalloon(t)
	if s := b.Status(); s.Stats != nil || !s.Taken.IsZero() {
		t.Errorf("statistics out of nowhere: %+v", s)
	}
	// Asked before the driver gave a buffer: it just waits.
	if err := b.Refresh(canceled(t)); !errors.Is(err, ErrNoStatistics) || !errors.Is(err, context.Canceled) {
		t.Errorf("refresh without a buffer: %v", err)
	}
	begin := time.Now()
	d.add(statsQueue, d.in(statsBuffer(4, 1000, 5, 2000, 77, 1, 9, 3)))
	d.notify(statsQueue)
	s := b.Status()
	if want := map[string]uint64{"free_memory": 1000, "total_memory": 2000, "hugetlb_failures": 3}; !reflect.DeepEqual(s.Stats, want) {
		t.Errorf("statistics %v, want %v", s.Stats, want)
	}
	if s.Taken.Before(begin) || s.Taken.After(time.Now()) {
		t.Errorf("taken at %v", s.Taken)
	}
	if _, _, ok := d.poll(statsQueue); ok {
		t.Fatal("the buffer came back unasked")
	}
	refresh := func() map[string]uint64 {
		t.Helper()
		asked := make(chan error, 1)
		go func() { asked <- b.Refresh(t.Context()) }()
		d.answerStats(statsBuffer(4, 1001))
		if err := <-asked; err != nil {
			t.Fatal(err)
		}
		return b.Status().Stats
	}
	if got := refresh(); len(got) != 1 || got["free_memory"] != 1001 {
		t.Errorf("new statistics %v", got)
	}

	// The driver is asked at the end of a pause it slept through, and again by the next device.
	d.check(d.tr.Pause())
	if err := b.Refresh(t.Context()); !errors.Is(err, ErrNoStatistics) {
		t.Errorf("refresh of a paused guest: %v", err)
	}
	d.check(d.tr.Resume())
	if got := refresh(); got["free_memory"] != 1001 {
		t.Errorf("after a pause: %v", got)
	}
	for range 3 {
		d.check(d.tr.Pause())
		was := b.Status()
		b = NewBalloon(d.mem, true)
		d = d.move(b)
		d.check(d.tr.Resume())
		if s := b.Status(); !s.Taken.Equal(was.Taken) || !reflect.DeepEqual(s.Stats, was.Stats) {
			t.Errorf("restored %+v, was %+v", s, was)
		}
		if got := refresh(); got["free_memory"] != 1001 {
			t.Errorf("after a restore: %v", got)
		}
	}
	// Asked, then saved before the guest could answer.
	if err := b.Refresh(canceled(t)); !errors.Is(err, context.Canceled) {
		t.Errorf("refresh of a guest that is slow: %v", err)
	}
	d.check(d.tr.Pause())
	b = NewBalloon(d.mem, true)
	d = d.move(b)
	d.check(d.tr.Resume())
	d.answerStats(statsBuffer(4, 1002))
	if got := b.Status().Stats; got["free_memory"] != 1002 {
		t.Errorf("an answer after a restore: %v", got)
	}
	if got := refresh(); got["free_memory"] != 1001 {
		t.Errorf("and then: %v", got)
	}
	d.set(tStatus, 0)
	if s := b.Status(); s.Stats != nil {
		t.Errorf("statistics after a reset: %v", s.Stats)
	}
}

// Buffers without end, empty, huge and unreadable: each comes back but the newest, and the device lives.
func TestBalloonHostileStatistics(t *testing.T) {
	d, b := startBalloon(t)
	for range 3 {
		d.add(statsQueue, buffer{at: 1 << 40, len: 1<<32 - 1})
		d.add(statsQueue, d.in(nil))
		d.add(statsQueue, d.out(100))
		d.add(statsQueue, d.in(statsBuffer(slices.Repeat([]uint64{4, 5}, 2*statMax)...)))
		d.notify(statsQueue)
	}
	back := 0
	for _, _, ok := d.poll(statsQueue); ok; _, _, ok = d.poll(statsQueue) {
		back++
	}
	if back != 11 || b.Status().Stats["free_memory"] != 5 {
		t.Errorf("%d buffers came back of 12; %v", back, b.Status().Stats)
	}
	if d.get(tStatus)&tNeedsReset != 0 {
		t.Error("the device gave up")
	}
}

func TestBalloonLoadRefuses(t *testing.T) {
	d, _ := startBalloon(t)
	d.add(statsQueue, d.in(statsBuffer(4, 1)))
	d.notify(statsQueue)
	d.check(d.tr.Pause())
	state, err := d.tr.Save()
	d.check(err)
	own := len(state) - binary.Size(savedBalloon{})
	load := func(s []byte) error { return newDriver(t, NewBalloon(d.mem, true), d.mem).tr.Load(s) }
	d.check(load(state))
	for name, at := range map[string]int{"version": 0, "held": 12, "head": 17, "head of a larger queue": 16, "known": 23, "time": 31} {
		bad := slices.Clone(state)
		bad[own+at] = 0x80 + bad[own+at]
		if err := load(bad); err == nil {
			t.Errorf("took another %s", name)
		}
	}
	if err := newDriver(t, NewBalloon(d.mem, false), d.mem).tr.Load(state); err == nil {
		t.Error("took a reporting driver to a device that cannot")
	}
}

// FuzzBalloon takes any bytes for page numbers, for reported ranges, for statistics and for a saved state.
func FuzzBalloon(f *testing.F) {
	f.Add(pageNumbers(100, 101, 1<<32-1), uint64(0x64000), uint32(0x10000), make([]byte, binary.Size(savedBalloon{})))
	f.Add(statsBuffer(0, 1, 9, 1<<63, 10, 2), uint64(1<<64-1), uint32(1<<32-1), []byte{1})
	f.Add([]byte{}, uint64(0), uint32(0), []byte{})
	f.Fuzz(func(t *testing.T, raw []byte, at uint64, n uint32, state []byte) {
		raw = raw[:min(len(raw), 1<<16)]
		d, b := startBalloon(t)
		d.add(balloonInflateQ, d.in(raw))
		d.add(balloonDeflateQ, d.in(raw))
		d.add(statsQueue, d.in(raw))
		d.add(balloonReportQ, buffer{guestmem.Addr(at), n, true}, buffer{guestmem.Addr(at) + firstPage*BalloonPage, n, true})
		for queue := range d.queues {
			d.notify(queue)
		}
		b.SetTarget(at)
		_ = b.Status()
		d.check(d.tr.Pause())
		d.tr.Close()

		loaded := NewBalloon(d.mem, true)
		if loaded.Load(state) != nil {
			return
		}
		if again, err := loaded.Save(); err != nil || !bytes.Equal(again, state) {
			t.Errorf("loaded %x, saved %x, %v", state, again, err)
		}
	})
}
