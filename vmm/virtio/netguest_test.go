package virtio

import (
	"encoding/binary"
	"errors"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var testMAC = MAC{2, 0, 0, 0, 0, 1}

// fakeTap is a pair of sockets that keep frames apart: one end for the device, the other for the test. Like a tap it takes
// a bounded number of frames.
type fakeTap struct {
	device *os.File
	wire   *os.File // non-blocking
	mu     sync.Mutex
	seen   int    // frames taken from the wire
	flags  []uint // of every call that sets offloads
	err    error  // what it answers
	lost   chan error
	limits NetLimits // of devices made from now on
}

func newFakeTap(t testing.TB) *fakeTap {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := &fakeTap{device: os.NewFile(uintptr(fds[0]), "tap"), wire: os.NewFile(uintptr(fds[1]), "wire"), lost: make(chan error, 1)}
	t.Cleanup(func() {
		f.device.Close()
		f.wire.Close()
	})
	return f
}

func (f *fakeTap) offload(_ int, flags uint) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.flags = append(f.flags, flags)
	return f.err
}

// newNet makes a device on the tap.
func (f *fakeTap) newNet(t testing.TB) *Net {
	t.Helper()
	n, err := newNetOn(f.device, testMAC, f.limits, func(err error) { f.lost <- err }, f.offload)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	return n
}

// drainedNet makes a device on a wire that takes anything and brings nothing.
func drainedNet(t testing.TB) *Net {
	t.Helper()
	tap := newFakeTap(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for p := make([]byte, 1<<17); ; {
			if _, err := tap.wire.Read(p); err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		tap.wire.Close()
		<-done
	})
	return tap.newNet(t)
}

// send puts a frame on the wire; false: it is full.
func (f *fakeTap) send(t testing.TB, frame []byte) bool {
	t.Helper()
	conn, err := f.wire.SyscallConn()
	if err == nil {
		cerr := conn.Control(func(fd uintptr) { _, err = unix.Write(int(fd), frame) })
		err = errors.Join(err, cerr)
	}
	if err != nil && !errors.Is(err, unix.EAGAIN) {
		t.Fatal(err)
	}
	return err == nil
}

// recv takes a frame from the wire.
func (f *fakeTap) recv(t testing.TB) []byte {
	t.Helper()
	p := make([]byte, 1<<17)
	f.wire.SetReadDeadline(time.Now().Add(patience))
	n, err := f.wire.Read(p)
	if err != nil {
		t.Fatalf("nothing on the wire: %v", err)
	}
	f.seen++
	return p[:n]
}

// netGuest is a driver of a network device. Its receive buffers are taken back and forth in the order of the ring.
type netGuest struct {
	*driver
	tap *fakeTap
	dev *Net
	rx  map[uint16][]buffer
}

func startNet(t testing.TB, refuse uint64) *netGuest {
	t.Helper()
	return startLimitedNet(t, refuse, NetLimits{})
}

func startLimitedNet(t testing.TB, refuse uint64, limits NetLimits) *netGuest {
	t.Helper()
	tap := newFakeTap(t)
	tap.limits = limits
	dev := tap.newNet(t)
	d := newDriver(t, dev, newMemory(t, testMemory))
	d.refuse = refuse
	d.init()
	return &netGuest{driver: d, tap: tap, dev: dev, rx: map[uint16][]buffer{}}
}

// restore moves the guest over to a fresh device on a fresh tap, paused.
func (g *netGuest) restore() *netGuest {
	g.t.Helper()
	return g.restoreLimited(NetLimits{})
}

func (g *netGuest) restoreLimited(limits NetLimits) *netGuest {
	g.t.Helper()
	tap := newFakeTap(g.t)
	tap.limits = limits
	dev := tap.newNet(g.t)
	return &netGuest{driver: g.move(dev), tap: tap, dev: dev, rx: g.rx}
}

// post gives the device a chain to receive into.
func (g *netGuest) post(bufs ...buffer) {
	g.t.Helper()
	g.rx[g.add(netRX, bufs...)] = bufs
}

// postN gives it n buffers of the given size.
func (g *netGuest) postN(n int, size uint32) {
	g.t.Helper()
	for range n {
		g.post(g.out(size))
	}
	g.notify(netRX)
}

// frame waits for a frame and returns it with its header, and how many buffers it took. All of them must be there at once.
func (g *netGuest) frame() (frame []byte, buffers int) {
	g.t.Helper()
	head, n := g.wait(netRX)
	frame = g.taken(head, n)
	if n < netHeaderBytes {
		g.t.Fatalf("a used buffer of %d bytes", n)
	}
	buffers = int(binary.LittleEndian.Uint16(frame[netNumBuffersOff:]))
	for range buffers - 1 {
		head, n, ok := g.poll(netRX)
		if !ok {
			g.t.Fatalf("a part of a frame in %d buffers is missing", buffers)
		}
		frame = append(frame, g.taken(head, n)...)
	}
	return frame, buffers
}

// taken returns the first n bytes of a chain that was posted and posts it no more.
func (g *netGuest) taken(head uint16, n uint32) []byte {
	g.t.Helper()
	var all []byte
	for _, b := range g.rx[head] {
		all = append(all, g.bytes(b)...)
	}
	delete(g.rx, head)
	if int(n) > len(all) {
		g.t.Fatalf("%d bytes in a chain of %d", n, len(all))
	}
	return all[:n]
}

// idle waits until the device has seen all that was done before: it takes nothing from a queue while it is paused.
func (g *netGuest) idle() {
	g.t.Helper()
	g.check(g.tr.Pause())
	g.check(g.tr.Resume())
}

// header is a virtio_net_hdr without demands.
func header() []byte { return make([]byte, netHeaderBytes) }

// netFrame is a frame of n bytes behind a header that says nothing.
func netFrame(n int, seed byte) []byte { return append(header(), pattern(n, seed)...) }
