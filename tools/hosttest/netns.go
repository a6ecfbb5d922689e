// Package hosttest makes parts of a host for tests of other packages: network namespaces, and tap devices in them.
package hosttest

import (
	"errors"
	"net"
	"os"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"torpor/tools/hosttest/netns"
)

// NetNS is a network namespace of its own. It is gone once the test has ended and everything made in it is closed.
type NetNS struct {
	ns *netns.NS
}

// NewNetNS makes a namespace, or skips the test where that is not permitted.
func NewNetNS(t testing.TB) *NetNS {
	t.Helper()
	ns, err := netns.New()
	if errors.Is(err, unix.EPERM) {
		t.Skip("needs root to make a network namespace")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(ns.Close)
	return &NetNS{ns}
}

// Do runs f in the namespace. Sockets that f makes stay there.
func (n *NetNS) Do(t testing.TB, f func() error) {
	t.Helper()
	if err := n.ns.Do(f); err != nil {
		t.Fatal(err)
	}
}

// TapFlags are those a virtio network device wants.
const TapFlags = netns.TapFlags

// Tap makes a tap device with the given flags, and, unless addr is empty, up and with that address ("10.0.0.1/24"). It lasts
// as long as the file that is returned, or a duplicate; the test's is closed at its end.
func (n *NetNS) Tap(t testing.TB, name, addr string, flags uint16) *os.File {
	t.Helper()
	file, err := n.ns.Tap(name, addr, flags)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = file.Close() })
	return file
}

// SetUp brings an interface up or down.
func (n *NetNS) SetUp(t testing.TB, name string, up bool) {
	t.Helper()
	n.Do(t, func() error {
		link, err := netlink.LinkByName(name)
		switch {
		case err != nil:
			return err
		case up:
			return netlink.LinkSetUp(link)
		}
		return netlink.LinkSetDown(link)
	})
}

// Delete removes an interface, whoever has it open.
func (n *NetNS) Delete(t testing.TB, name string) {
	t.Helper()
	n.Do(t, func() error {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		return netlink.LinkDel(link)
	})
}

// Listen listens for TCP connections at addr in the namespace, until the test ends.
func (n *NetNS) Listen(t testing.TB, addr string) *net.TCPListener {
	t.Helper()
	var l net.Listener
	n.Do(t, func() (err error) {
		l, err = net.Listen("tcp", addr)
		return err
	})
	t.Cleanup(func() { _ = l.Close() })
	return l.(*net.TCPListener)
}

// ListenPacket opens a UDP socket at addr in the namespace, until the test ends. It may send to broadcast addresses.
func (n *NetNS) ListenPacket(t testing.TB, addr string) *net.UDPConn {
	t.Helper()
	var c net.PacketConn
	n.Do(t, func() (err error) {
		c, err = net.ListenPacket("udp4", addr)
		return err
	})
	t.Cleanup(func() { _ = c.Close() })
	return c.(*net.UDPConn)
}
