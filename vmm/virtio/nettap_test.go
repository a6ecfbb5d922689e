package virtio

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"torpor/tools/hosttest"
)

// The tests of this file have a real tap, in a network namespace of their own; they need root.

// tapGuest is a guest at 10.9.0.2 on a tap whose other side is the host at 10.9.0.1.
type tapGuest struct {
	*netGuest
	ns   *hosttest.NetNS
	udp  *net.UDPConn // of the host
	lost chan error
}

func startTap(t *testing.T, refuse uint64) *tapGuest {
	t.Helper()
	g := &tapGuest{ns: hosttest.NewNetNS(t), lost: make(chan error, 1)}
	dev := g.newNet(t)
	d := newDriver(t, dev, newMemory(t, testMemory))
	d.refuse = refuse
	d.init()
	g.netGuest = &netGuest{driver: d, dev: dev, rx: map[uint16][]buffer{}}
	return g
}

func (g *tapGuest) newNet(t *testing.T) *Net {
	t.Helper()
	file := g.ns.Tap(t, "tap0", "10.9.0.1/24", hosttest.TapFlags)
	dev, err := NewNet(file, testMAC, NetLimits{}, func(err error) { g.lost <- err })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dev.Close() })
	g.udp = g.ns.ListenPacket(t, ":7")
	return dev
}

// hear lets the host send a datagram to everybody, and returns header, IP packet and payload as the guest gets them.
func (g *tapGuest) hear(payload string) (head, ip []byte) {
	g.t.Helper()
	if _, err := g.udp.WriteTo([]byte(payload), &net.UDPAddr{IP: net.IPv4(10, 9, 0, 255), Port: 9}); err != nil {
		g.t.Fatal(err)
	}
	for {
		g.postN(1, 2048)
		f, _ := g.frame()
		g.next -= 2048
		head, ip = f[:netHeaderBytes], f[netHeaderBytes+netMinFrame:]
		if len(ip) == 28+len(payload) && ip[9] == 17 && string(ip[28:]) == payload { // not the kernel's own chatter
			return head, ip
		}
	}
}

// say sends a datagram to the host with the checksum left to it, or, if whole, a right one.
func (g *tapGuest) say(payload string, whole bool) {
	g.t.Helper()
	be := binary.BigEndian
	ip := make([]byte, 28, 28+len(payload))
	ip[0], ip[8], ip[9] = 0x45, 64, 17
	be.PutUint16(ip[2:], uint16(28+len(payload)))
	copy(ip[12:], []byte{10, 9, 0, 2, 10, 9, 0, 1})
	be.PutUint16(ip[10:], ^sum(0, ip[:20]))
	be.PutUint16(ip[20:], 9)
	be.PutUint16(ip[22:], 7)
	be.PutUint16(ip[24:], uint16(8+len(payload)))
	ip = append(ip, payload...)
	head := header()
	be.PutUint16(ip[26:], sum(0, pseudo(ip)))
	if whole {
		be.PutUint16(ip[26:], ^sum(0, ip[20:]))
	} else {
		head[0] = netNeedsCsum
		binary.LittleEndian.PutUint16(head[6:], 14+20)
		binary.LittleEndian.PutUint16(head[8:], 6)
	}
	eth := append(bytes.Repeat([]byte{0xff}, 6), testMAC[:]...)
	eth = append(eth, 8, 0)
	g.add(netTX, g.in(head), g.in(append(eth, ip...)))
	g.notify(netTX)
	g.wait(netTX)
}

func (g *tapGuest) heard(want string) {
	g.t.Helper()
	p := make([]byte, 2000)
	g.udp.SetReadDeadline(time.Now().Add(patience))
	n, _, err := g.udp.ReadFrom(p)
	if err != nil || string(p[:n]) != want {
		g.t.Fatalf("the host hears %q, %v, want %q", p[:n], err, want)
	}
}

// pseudo is the part of the UDP pseudo header and packet that a sender leaves in the checksum field.
func pseudo(ip []byte) []byte {
	p := append([]byte(nil), ip[12:20]...)
	return append(p, 0, ip[9], ip[24], ip[25])
}

// sum is the Internet checksum, not inverted.
func sum(s uint32, p []byte) uint16 {
	for len(p) > 1 {
		s += uint32(binary.BigEndian.Uint16(p))
		p = p[2:]
	}
	if len(p) == 1 {
		s += uint32(p[0]) << 8
	}
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return uint16(s)
}

// Checksums are left to whoever can do them, before and after a restore onto a new tap.
func TestTapChecksums(t *testing.T) {
	for _, c := range []struct {
		name   string
		refuse uint64
		whole  bool
	}{
		{"offloaded", 0, false},
		{"whole", netCsum | netGuestCsum | netHostTSO4 | netHostTSO6 | netGuestTSO4 | netGuestTSO6, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := startTap(t, c.refuse)
			for range 3 {
				head, ip := g.hear("from the host")
				if whole := head[0]&netNeedsCsum == 0; whole != c.whole {
					t.Errorf("header %x", head)
				}
				if whole := sum(0, append(pseudo(ip), ip[20:]...)) == 0xffff; whole != c.whole {
					t.Errorf("the checksum is right: %v", whole)
				}
				g.say("from the guest", c.whole)
				g.heard("from the guest")

				g.check(g.tr.Pause())
				old, udp := g.dev, g.udp
				g.ns.Delete(t, "tap0")
				udp.Close()
				dev := g.newNet(t)
				g.netGuest = &netGuest{driver: g.move(dev), dev: dev, rx: g.rx}
				old.Close()
				g.check(g.tr.Resume())
			}
		})
	}
}

// An interface that is down takes nothing, and that is all.
func TestTapDown(t *testing.T) {
	g := startTap(t, 0)
	for range 2 {
		g.ns.SetUp(t, "tap0", false)
		g.say("lost", false)
		g.ns.SetUp(t, "tap0", true)
		g.say("found", false)
		g.heard("found")
		g.hear("and back")
	}
	if s := g.dev.Stats(); s.TXDropped != 2 || len(g.lost) != 0 {
		t.Errorf("%+v, lost %d", s, len(g.lost))
	}
}

// An interface that is deleted takes the link down.
func TestTapDeleted(t *testing.T) {
	g := startTap(t, 0)
	g.postN(1, 2048)
	g.say("before", false)
	g.heard("before")
	g.ns.Delete(t, "tap0")
	g.say("after", false)
	select {
	case err := <-g.lost:
		if !errors.Is(err, errTapGone) {
			t.Errorf("lost by %v", err)
		}
	case <-time.After(patience):
		t.Fatal("nobody was told")
	}
	var status [2]byte
	g.tr.Read(tConfig+6, status[:])
	if status[0] != 0 {
		t.Error("the link is up")
	}
	g.say("and again", false)
	g.idle()
}

func TestNewNetRefusesWhatIsNoTap(t *testing.T) {
	ns := hosttest.NewNetNS(t)
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	tun, err := os.Open("/dev/net/tun")
	if err != nil {
		t.Fatal(err)
	}
	defer tun.Close()
	for name, file := range map[string]*os.File{
		"no tap":       null,
		"no interface": tun,
		"no header":    ns.Tap(t, "tap1", "", hosttest.TapFlags&^unix.IFF_VNET_HDR),
		"IP":           ns.Tap(t, "tap2", "", hosttest.TapFlags&^unix.IFF_TAP|unix.IFF_TUN),
	} {
		n, err := NewNet(file, testMAC, NetLimits{}, func(error) {})
		if !errors.Is(err, ErrTap) {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil {
			n.Close()
		}
	}
}

// A tap with a short queue to a slow wire holds the guest's frames back and loses none.
func TestTapFull(t *testing.T) {
	const frames = 200
	g := startTap(t, 0)
	g.check(control(g.dev.tap.file, func(fd int) error { return unix.IoctlSetPointerInt(fd, unix.TUNSETSNDBUF, 8000) }))
	g.ns.Do(t, func() error { return slowWire("tap0") })
	for range frames {
		f := netFrame(1000, 1)
		copy(f[netHeaderBytes:], []byte{2, 0, 0, 0, 0, 9, 2}) // to one, or the bridge sends a copy, which does not count
		g.add(netTX, g.in(f))
	}
	g.notify(netTX)
	for i := range frames {
		if i == frames/2 {
			if s := g.dev.Stats(); s.TXFrames == frames {
				t.Error("the wire was not slow")
			}
			g.idle()
		}
		g.wait(netTX)
	}
	if s := g.dev.Stats(); s.TXFrames != frames || s.TXDropped != 0 {
		t.Errorf("%+v", s)
	}
}

// slowWire bridges a tap to a link of 4 Mbit/s; frames on their way through it count against the tap's queue.
func slowWire(tap string) error {
	attrs := func(name string) netlink.LinkAttrs {
		a := netlink.NewLinkAttrs()
		a.Name = name
		return a
	}
	bridge := &netlink.Bridge{LinkAttrs: attrs("bridge")}
	wire := &netlink.Veth{LinkAttrs: attrs("wire"), PeerName: "far"}
	for _, l := range []netlink.Link{bridge, wire} {
		if err := netlink.LinkAdd(l); err != nil {
			return err
		}
	}
	for _, name := range []string{tap, "wire", "far", "bridge"} {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		if name == tap || name == "wire" {
			if err := netlink.LinkSetMaster(l, bridge); err != nil {
				return err
			}
		}
		if err := netlink.LinkSetUp(l); err != nil {
			return err
		}
	}
	return netlink.QdiscAdd(&netlink.Tbf{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: wire.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
		Rate:       500_000, Limit: 1 << 20, Buffer: 100_000, // bytes a second, bytes, ticks
	})
}
