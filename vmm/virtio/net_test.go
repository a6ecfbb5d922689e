package virtio

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"torpor/vmm/guestmem"
	"torpor/vmm/virtio/virtq"
)

func TestNetConfig(t *testing.T) {
	g := startNet(t, 0)
	var got [12]byte
	g.tr.Read(tConfig, got[:])
	if want := append(testMAC[:], 1, 0, 0, 0, 0, 0); !bytes.Equal(got[:], want) {
		t.Errorf("configuration %x, want %x", got, want)
	}
}

func TestNetReceives(t *testing.T) {
	for _, c := range []struct {
		name    string
		frame   int
		post    []uint32 // sizes of buffers, a chain each
		buffers int
	}{
		{"shortest", 14, []uint32{1536}, 1},
		{"one buffer", 1500, []uint32{1536}, 1},
		{"fills a buffer", 1524, []uint32{1536, 1536}, 1},
		{"a byte more", 1525, []uint32{1536, 1536}, 2},
		{"several", 5000, []uint32{1536, 1536, 1536, 1536, 1536}, 4},
		{"longest", netMaxFrame, []uint32{32 << 10, 32 << 10, 32 << 10}, 3},
		{"a header alone in a buffer", 100, []uint32{12, 100}, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := startNet(t, 0)
			for _, n := range c.post {
				g.post(g.out(n))
			}
			g.notify(netRX)
			want := netFrame(c.frame, 7)
			want[0], want[1], want[2] = 1, netGSOTCPv4, 54 // the tap's word goes through
			if !g.tap.send(t, want) {
				t.Fatal("the wire is full")
			}
			got, buffers := g.frame()
			binary.LittleEndian.PutUint16(want[netNumBuffersOff:], uint16(c.buffers))
			if !bytes.Equal(got, want) || buffers != c.buffers {
				t.Errorf("%d bytes in %d buffers, want %d in %d", len(got), buffers, len(want), c.buffers)
			}
			if s := g.dev.Stats(); s.RXFrames != 1 || s.RXBytes != uint64(c.frame) || s.RXDropped != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// Without merging a frame has one chain, of several buffers perhaps, and what does not fit is dropped whole.
func TestNetReceivesWithoutMerging(t *testing.T) {
	g := startNet(t, netMergeRX)
	g.post(g.out(12), g.out(1000))
	g.post(g.out(netHeaderBytes), g.out(100), g.out(30000), g.out(40000))
	g.notify(netRX)
	g.tap.send(t, netFrame(1001, 1)) // does not fit the first
	for i, n := range []int{1000, 60000} {
		want := netFrame(n, byte(i))
		g.tap.send(t, want)
		want[netNumBuffersOff] = 1
		if got, _ := g.frame(); !bytes.Equal(got, want) {
			t.Errorf("frame of %d: got %d bytes", n, len(got))
		}
	}
	if s := g.dev.Stats(); s.RXFrames != 2 || s.RXDropped != 1 {
		t.Errorf("%+v", s)
	}
}

// A frame for which there is not enough room waits for more, and is not cut.
func TestNetReceiveWaitsForRoom(t *testing.T) {
	g := startNet(t, 0)
	g.postN(3, 1536)
	want := netFrame(20000, 3)
	g.tap.send(t, want)
	for range 10 {
		g.postN(2, 1536)
		if len(g.rx)*1536 < len(want) {
			if _, _, ok := g.poll(netRX); ok {
				t.Fatal("a part of a frame")
			}
		}
	}
	got, buffers := g.frame()
	binary.LittleEndian.PutUint16(want[netNumBuffersOff:], 14)
	if !bytes.Equal(got, want) || buffers != 14 {
		t.Errorf("%d bytes in %d buffers", len(got), buffers)
	}
}

// A frame larger than all a driver can have is dropped, so that smaller ones come through.
func TestNetReceiveGivesUpOnAFrame(t *testing.T) {
	g := startNet(t, 0)
	for range netQueueSize {
		g.post(g.out(100))
	}
	g.notify(netRX)
	g.tap.send(t, netFrame(60000, 1))
	g.tap.send(t, netFrame(70, 2))
	if got, _ := g.frame(); len(got) != netHeaderBytes+70 {
		t.Errorf("%d bytes", len(got))
	}
	if s := g.dev.Stats(); s.RXDropped != 1 {
		t.Errorf("%+v", s)
	}
}

// Without buffers the tap is left alone; once there are some, all that it kept comes, in order.
func TestNetReceiveWithoutBuffers(t *testing.T) {
	g := startNet(t, 0)
	sent := 0
	for g.tap.send(t, netFrame(1000, byte(sent))) {
		sent++
	}
	if s := g.dev.Stats(); s != (NetStats{}) {
		t.Errorf("%+v without a buffer", s)
	}
	for i := range sent {
		g.postN(1, 1536)
		want := netFrame(1000, byte(i))
		want[netNumBuffersOff] = 1
		if got, _ := g.frame(); !bytes.Equal(got, want) {
			t.Fatalf("frame %d of %d is another", i, sent)
		}
		g.next -= 1536 // the buffer is free
	}
}

func TestNetDropsFramesOfTheTap(t *testing.T) {
	g := startNet(t, 0)
	g.postN(50, 1536)
	for _, n := range []int{1, 11, 12, 25} {
		g.tap.send(t, make([]byte, n))
	}
	g.tap.send(t, netFrame(netMaxFrame+1, 1))
	g.tap.send(t, netFrame(netMaxFrame+10000, 1))
	g.tap.send(t, netFrame(64, 1))
	if got, _ := g.frame(); len(got) != netHeaderBytes+64 {
		t.Errorf("%d bytes", len(got))
	}
	if s := g.dev.Stats(); s.RXDropped != 6 || s.RXFrames != 1 {
		t.Errorf("%+v", s)
	}
}

// Chains that no frame can go into come back empty, in their turn, and the rest works.
func TestNetUselessBuffers(t *testing.T) {
	g := startNet(t, 0)
	g.post(g.out(1536))
	useless := [][]buffer{
		{g.out(11)},
		{{at: 1 << 40, len: 1536, writable: true}},
		{g.out(100), {at: testMemory - 10, len: 11, writable: true}},
		{g.in(make([]byte, 100))},
		{{at: 0, len: 1<<32 - 1, writable: true}},
	}
	for _, bufs := range useless {
		g.post(bufs...)
	}
	g.post(g.out(1536))
	g.notify(netRX)
	for i := range 2 {
		g.tap.send(t, netFrame(500, byte(i)))
	}
	g.frame()
	for i := range useless {
		if _, n := g.wait(netRX); n != 0 {
			t.Errorf("useless chain %d: %d bytes", i, n)
		}
	}
	if got, _ := g.frame(); len(got) != netHeaderBytes+500 {
		t.Errorf("%d bytes", len(got))
	}
}

// A useless chain behind one that is too small for any frame stops nothing.
func TestNetUselessBufferInAFrame(t *testing.T) {
	g := startNet(t, 0)
	g.post(g.out(12))
	g.post(g.out(1))
	g.postN(2, 1536)
	g.tap.send(t, netFrame(200, 1))
	for range 2 {
		if _, n := g.wait(netRX); n != 0 {
			t.Errorf("%d bytes", n)
		}
	}
	g.tap.send(t, netFrame(200, 2))
	if got, _ := g.frame(); !bytes.Equal(got[netHeaderBytes:], pattern(200, 2)) {
		t.Error("another frame")
	}
	if s := g.dev.Stats(); s.RXDropped != 1 || s.RXFrames != 1 {
		t.Errorf("%+v", s)
	}
}

func TestNetSends(t *testing.T) {
	g := startNet(t, 0)
	frame := pattern(60000, 5)
	head := header()
	head[0], head[1] = netNeedsCsum|0x80, netGSOTCPv6
	binary.LittleEndian.PutUint16(head[2:], 74)
	binary.LittleEndian.PutUint16(head[4:], 1400)
	binary.LittleEndian.PutUint16(head[6:], 54)
	binary.LittleEndian.PutUint16(head[8:], 16)
	head[netNumBuffersOff] = 77
	all := slices.Concat(head, frame)
	// However the driver scatters it.
	for _, cuts := range [][]int{{}, {12}, {5, 12}, {1, 2, 3, 40}, {20, 20}, {26, 40000}} {
		var bufs []buffer
		rest := all
		at := 0
		for _, c := range append(cuts, len(all)) {
			bufs = append(bufs, g.in(rest[:c-at]))
			rest, at = rest[c-at:], c
		}
		g.add(netTX, bufs...)
		g.notify(netTX)
		want := slices.Clone(all)
		want[0], want[netNumBuffersOff] = netNeedsCsum, 0
		if got := g.tap.recv(t); !bytes.Equal(got, want) {
			t.Errorf("cut at %v: %d bytes on the wire, want %d", cuts, len(got), len(want))
		}
		if _, n := g.wait(netTX); n != 0 {
			t.Errorf("%d bytes written to a frame sent", n)
		}
	}
	if s := g.dev.Stats(); s.TXFrames != 6 || s.TXBytes != 6*60000 || s.TXDropped != 0 {
		t.Errorf("%+v", s)
	}
}

// Frames that make no sense are given back and go nowhere.
func TestNetDropsFramesOfTheGuest(t *testing.T) {
	g := startNet(t, 0)
	for _, bufs := range [][]buffer{
		{g.in(nil)},
		{g.in(make([]byte, 12))},
		{g.in(make([]byte, 25))},
		{g.in(make([]byte, netHeaderBytes+netMaxFrame+1))},
		{g.out(100)},
		{g.in(header()), {at: 1 << 40, len: 100}},
		{g.in(header()), {at: testMemory - 50, len: 100}},
		{{at: 1 << 40, len: 100}},
		{g.in(header()), {at: 0, len: 1<<32 - 1}},
	} {
		g.add(netTX, bufs...)
		g.notify(netTX)
		g.wait(netTX)
	}
	g.add(netTX, g.in(netFrame(14, 1)))
	g.notify(netTX)
	if got := g.tap.recv(t); !bytes.Equal(got, netFrame(14, 1)) {
		t.Errorf("%x on the wire", got)
	}
	g.wait(netTX)
	if s := g.dev.Stats(); s.TXDropped != 9 || s.TXFrames != 1 {
		t.Errorf("%+v", s)
	}
}

func TestNetChecksHeaders(t *testing.T) {
	const all = netCsum | netHostTSO4 | netHostTSO6
	type fields struct {
		flags, gso            byte
		hdrLen, size, csum, o uint16
	}
	for _, c := range []struct {
		name     string
		features uint64
		fields
		ok bool
	}{
		{"nothing", 0, fields{}, true},
		{"unknown flags", 0, fields{flags: 0xfe}, true},
		{"checksum", all, fields{flags: 1, csum: 34, o: 16}, true},
		{"checksum at the end", all, fields{flags: 1, csum: 84, o: 14}, true},
		{"checksum beyond it", all, fields{flags: 1, csum: 84, o: 15}, false},
		{"checksum far beyond it", all, fields{flags: 1, csum: 65535, o: 65535}, false},
		{"checksum not negotiated", netHostTSO4, fields{flags: 1, csum: 34, o: 16}, false},
		{"segments", all, fields{1, netGSOTCPv4, 54, 1448, 34, 16}, true},
		{"segments of IPv6", all, fields{1, netGSOTCPv6, 74, 1428, 54, 16}, true},
		{"segments not negotiated", netCsum | netHostTSO6, fields{1, netGSOTCPv4, 54, 1448, 34, 16}, false},
		{"segments of IPv6 not negotiated", netCsum | netHostTSO4, fields{1, netGSOTCPv6, 74, 1428, 54, 16}, false},
		{"segments without a size", all, fields{1, netGSOTCPv4, 54, 0, 34, 16}, false},
		{"segments without a checksum", all, fields{0, netGSOTCPv4, 54, 1448, 34, 16}, false},
		{"headers longer than the frame", all, fields{1, netGSOTCPv4, 101, 1448, 34, 16}, false},
		{"UDP fragments", ^uint64(0), fields{1, 3, 42, 1448, 34, 6}, false},
		{"ECN", all, fields{1, netGSOTCPv4 | 0x80, 54, 1448, 34, 16}, false},
		{"a size without segments", all, fields{gso: 0, hdrLen: 60000, size: 60000}, true},
	} {
		var h [netHeaderBytes]byte
		h[0], h[1] = c.flags, c.gso
		for i, v := range []uint16{c.hdrLen, c.size, c.csum, c.o, 9} {
			binary.LittleEndian.PutUint16(h[2+2*i:], v)
		}
		if ok := checkFrame(&h, c.features, 100); ok != c.ok {
			t.Errorf("%s: %v", c.name, ok)
		}
		if h[0]&^1 != 0 || h[10] != 0 || c.ok && h[1] == 0 && !bytes.Equal(h[2:6], make([]byte, 4)) {
			t.Errorf("%s: header %x for the host", c.name, h)
		}
	}
}

// A tap that is full holds the guest's frames back; all come in the end, each once, in order, over a pause as well.
func TestNetFullTap(t *testing.T) {
	g := startNet(t, 0)
	for i := range netQueueSize {
		g.add(netTX, g.in(netFrame(2000, byte(i))))
	}
	g.notify(netTX)
	sent := func() int { return int(g.dev.Stats().TXFrames) }
	for before := -1; before != sent(); { // until a pause finds it where the last one did: it waits
		before = sent()
		g.idle()
	}
	if sent() == netQueueSize {
		t.Fatal("the wire took everything")
	}
	for i := range netQueueSize {
		if i == netQueueSize/2 {
			g.check(g.tr.Pause())
			g.check(g.tr.Resume())
		}
		if got := g.tap.recv(t); !bytes.Equal(got, netFrame(2000, byte(i))) {
			t.Fatalf("frame %d is another", i)
		}
	}
	for range netQueueSize {
		g.wait(netTX)
	}
	if s := g.dev.Stats(); s.TXFrames != netQueueSize || s.TXDropped != 0 {
		t.Errorf("%+v", s)
	}
}

// Frames flow both ways while the machine is saved and moved to another tap, time and again.
func TestNetSnapshotUnderTraffic(t *testing.T) {
	const frames, size = 40, 3000
	g := startNet(t, 0)
	number := func(f []byte) uint32 { return binary.LittleEndian.Uint32(f[netHeaderBytes:]) }
	numbered := func(n uint32) []byte {
		f := netFrame(size, 1)
		binary.LittleEndian.PutUint32(f[netHeaderBytes:], n)
		return f
	}
	var out, outSeen, in, inSeen uint32
	for range 12 {
		for range frames {
			g.tap.send(t, numbered(in))
			in++
			g.postN(min(1, max(0, frames-len(g.rx))), 1536) // fewer than there are frames
			g.add(netTX, g.in(numbered(out)))
			out++
			g.notify(netTX)
		}
		g.check(g.tr.Pause())
		n := g.restore()
		// What the old tap was given has left the machine.
		for g.tap.seen < int(g.dev.Stats().TXFrames) {
			if got := number(g.tap.recv(t)); got != outSeen {
				t.Fatalf("frame %d from the guest, want %d", got, outSeen)
			}
			outSeen++
		}
		g = n
		// Whoever adds to the queue of a paused machine is not heard.
		for len(g.rx) < 3*frames {
			g.post(g.out(1536))
		}
		g.check(g.tr.Resume())
		g.tap.send(t, numbered(in))
		for got := in + 1; got != in; {
			f, _ := g.frame()
			if got = number(f); got < inSeen || len(f) != netHeaderBytes+size {
				t.Fatalf("frame %d of %d bytes for the guest, after %d", got, len(f), inSeen)
			}
			inSeen = got + 1
		}
		in++
		for outSeen < out {
			if got := number(g.tap.recv(t)); got != outSeen {
				t.Fatalf("frame %d from the guest, want %d", got, outSeen)
			}
			outSeen++
		}
		for range frames {
			g.wait(netTX)
		}
		// The memory of the frames is free; that of buffers is not.
		g.tap.mu.Lock()
		flags := slices.Clone(g.tap.flags)
		g.tap.mu.Unlock()
		if !slices.Equal(flags, []uint{unix.TUN_F_CSUM | unix.TUN_F_TSO4 | unix.TUN_F_TSO6}) {
			t.Fatalf("the new tap was told %v", flags)
		}
	}
}

// What was posted and not used before a pause is used after it.
func TestNetPauseLeavesBuffersInTheQueue(t *testing.T) {
	g := startNet(t, 0)
	g.postN(10, 1536)
	for i := range 5 {
		g.check(g.tr.Pause())
		if i%2 == 0 {
			g = g.restore()
		}
		g.check(g.tr.Resume())
		g.tap.send(t, netFrame(2000, byte(i)))
		if got, n := g.frame(); n != 2 || !bytes.Equal(got[netHeaderBytes:], pattern(2000, byte(i))) {
			t.Fatalf("frame %d is another", i)
		}
	}
}

func TestNetOffloadsFollowFeatures(t *testing.T) {
	const tso = netGuestTSO4 | netGuestTSO6
	for _, c := range []struct {
		name   string
		refuse uint64
		flags  uint
		broken bool
	}{
		{"all", 0, unix.TUN_F_CSUM | unix.TUN_F_TSO4 | unix.TUN_F_TSO6, false},
		{"no segments", tso, unix.TUN_F_CSUM, false},
		{"IPv4", netGuestTSO6, unix.TUN_F_CSUM | unix.TUN_F_TSO4, false},
		{"IPv6", netGuestTSO4, unix.TUN_F_CSUM | unix.TUN_F_TSO6, false},
		{"none", tso | netGuestCsum | netCsum | netHostTSO4 | netHostTSO6, 0, false},
		{"segments without checksums", netGuestCsum, 0, true},
		{"segments from the guest without checksums", netCsum, 0, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			tap := newFakeTap(t)
			d := newDriver(t, tap.newNet(t), newMemory(t, testMemory))
			d.refuse = c.refuse
			d.negotiate()
			for i := range uint32(netQueues) {
				d.set(tQueueSelect, i)
				d.addQueue(16)
			}
			d.set(tStatus, d.get(tStatus)|4)
			if broken := d.get(tStatus)&tNeedsReset != 0; broken != c.broken {
				t.Fatalf("needs a reset: %v", broken)
			}
			want := []uint{c.flags}
			if c.broken {
				want = nil
			}
			if !slices.Equal(tap.flags, want) {
				t.Errorf("the tap was told %v", tap.flags)
			}
		})
	}
}

// The tap goes away: the guest is told, its frames go nowhere, all else works. A restore onto another tap brings the link back.
func TestNetTapGoesAway(t *testing.T) {
	for _, way := range []string{"found by reading", "found by writing"} {
		t.Run(way, func(t *testing.T) {
			g := startNet(t, 0)
			link := func() bool {
				var p [2]byte
				g.tr.Read(tConfig+6, p[:])
				return p[0]&1 != 0
			}
			g.tap.wire.Close()
			switch way {
			case "found by reading":
				g.postN(1, 1536)
			case "found by writing":
				g.add(netTX, g.in(netFrame(100, 1)))
				g.notify(netTX)
				g.wait(netTX)
			}
			select {
			case err := <-g.tap.lost:
				if !errors.Is(err, errTapGone) {
					t.Errorf("lost by %v", err)
				}
			case <-time.After(patience):
				t.Fatal("nobody was told")
			}
			if !g.until(func() bool { return !link() }) {
				t.Fatal("the guest was not told")
			}
			for range 3 {
				g.add(netTX, g.in(netFrame(100, 1)))
				g.notify(netTX)
				g.wait(netTX)
				g.idle()
			}
			if s := g.dev.Stats(); s.TXFrames != 0 || s.TXDropped < 3 {
				t.Errorf("%+v", s)
			}
			if len(g.tap.lost) != 0 {
				t.Error("told twice")
			}

			g.check(g.tr.Pause())
			g = g.restore()
			g.set(tAck, g.get(tInterrupt))
			g.check(g.tr.Resume())
			if !link() || g.get(tInterrupt)&2 == 0 {
				t.Error("the guest does not hear that the link is back")
			}
			g.add(netTX, g.in(netFrame(100, 1)))
			g.notify(netTX)
			g.tap.recv(t)
		})
	}
}

// A tap that is gone when the driver comes is no reason to refuse the driver; one that cannot do what it must is.
func TestNetTapRefusesOffloads(t *testing.T) {
	for _, c := range []struct {
		err   error
		reset bool
	}{{unix.EBADFD, false}, {unix.EINVAL, true}} {
		tap := newFakeTap(t)
		tap.err = c.err
		d := newDriver(t, tap.newNet(t), newMemory(t, testMemory))
		d.negotiate()
		for i := range uint32(netQueues) {
			d.set(tQueueSelect, i)
			d.addQueue(16)
		}
		d.set(tStatus, d.get(tStatus)|4)
		if reset := d.get(tStatus)&tNeedsReset != 0; reset != c.reset || len(tap.lost) == 1 == c.reset {
			t.Errorf("%v: needs reset %v, %d told", c.err, reset, len(tap.lost))
		}
	}
}

func TestNetLoadRefusesBadState(t *testing.T) {
	g := startNet(t, 0)
	g.check(g.tr.Pause())
	state, err := g.dev.Save()
	g.check(err)
	other := slices.Clone(state)
	other[len(other)-1]++ // of the address
	dev := newFakeTap(t).newNet(t)
	for _, bad := range [][]byte{nil, state[:len(state)-1], append(slices.Clone(state), 0), append([]byte{9}, state[1:]...), other} {
		if dev.Load(bad) == nil {
			t.Errorf("took %x", bad)
		}
	}
	g.check(dev.Load(state))
}

// A page of the guest that cannot be accessed costs one frame.
func TestNetBadPage(t *testing.T) {
	good := make([]byte, 1<<20)
	bad, err := unix.Mmap(-1, 0, guestmem.PageSize, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(bad)
	mem, err := guestmem.New([]guestmem.Region{{GPA: 0, Bytes: good}, {GPA: 1 << 20, Bytes: bad}})
	if err != nil {
		t.Fatal(err)
	}
	tap := newFakeTap(t)
	dev := tap.newNet(t)
	g := &netGuest{driver: newDriver(t, dev, mem), tap: tap, dev: dev, rx: map[uint16][]buffer{}}
	g.init()
	hole := buffer{at: 1 << 20, len: 1000, writable: true}
	g.post(hole)
	g.notify(netRX)
	tap.send(t, netFrame(100, 1))
	if _, n := g.wait(netRX); n != 0 {
		t.Errorf("%d bytes", n)
	}
	hole.writable = false
	g.add(netTX, g.in(header()), hole)
	g.notify(netTX)
	g.wait(netTX)
	if s := dev.Stats(); s.RXDropped != 1 || s.TXDropped != 1 {
		t.Errorf("%+v", s)
	}
	g.postN(1, 1536)
	tap.send(t, netFrame(100, 2))
	if got, _ := g.frame(); !bytes.Equal(got[netHeaderBytes:], pattern(100, 2)) {
		t.Error("another frame")
	}
}

// FuzzNet lets both sides put anything anywhere: descriptors and headers of the guest, frames of the wire.
func FuzzNet(f *testing.F) {
	f.Add([]byte{}, []byte{}, uint16(0), false)
	f.Add(netFrame(100, 1), netFrame(2000, 2), uint16(1), true)
	f.Add([]byte("\x01\x01\x36\x00\xa8\x05\x22\x00\x10\x00\x00\x00"), make([]byte, 5), uint16(0x0102), true)
	f.Add(pattern(300, 3), pattern(1000, 4), uint16(0xffff), false)
	f.Fuzz(func(t *testing.T, script, frame []byte, shape uint16, merge bool) {
		tap := newFakeTap(t)
		dev := tap.newNet(t)
		d := newDriver(t, dev, sharedMemory(t))
		if !merge {
			d.refuse = netMergeRX
		}
		d.init()
		if len(frame) > 0 && len(frame) < netHeaderBytes+netMaxFrame+100 {
			tap.send(t, frame)
		}
		d.add(netTX, d.in(script))
		// Descriptors of whatever the script says, over and over each other.
		for i := 0; len(script) >= 8 && i < netQueueSize; i++ {
			at := guestmem.Addr(binary.LittleEndian.Uint32(script)) % (testMemory + guestmem.PageSize)
			n := uint32(binary.LittleEndian.Uint16(script[4:])) << (script[6] % 17)
			queue := int(script[7] & 1)
			d.writeDesc(queue, uint16(i), buffer{at, n, false}, uint16(script[7]>>1&3), uint16(i+1)%(shape|1))
			d.publish(queue, uint16(i))
			if script[7]&0x80 != 0 {
				d.notify(queue)
			}
			script = script[8:]
		}
		for queue := range netQueues {
			d.notify(queue)
		}
		d.check(d.tr.Pause())
		state, err := d.tr.Save()
		d.check(err)
		d.check(d.tr.Resume())
		if len(frame) > 0 && len(frame) < netHeaderBytes+netMaxFrame+100 {
			tap.send(t, frame)
		}
		d.tr.Close()
		s := dev.Stats()
		if s.RXFrames > 2 || s.TXFrames > 2*netQueueSize+2 {
			t.Fatalf("%+v", s)
		}
		dev2 := newFakeTap(t).newNet(t)
		n := newDriver(t, dev2, d.mem)
		if err := n.tr.Load(state); err != nil && !errors.Is(err, virtq.ErrBroken) {
			t.Fatal(err)
		}
		if n.tr.Resume() != nil {
			t.Fatal("not resumed")
		}
	})
}
