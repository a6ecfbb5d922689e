// Package hosttest makes parts of a host for tests of other packages: network namespaces, and tap devices in them.
package hosttest

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// NetNS is a network namespace of its own. It is gone once the test has ended and everything made in it is closed.
type NetNS struct {
	calls chan func()
}

// NewNetNS makes a namespace, or skips the test where that is not permitted.
func NewNetNS(t testing.TB) *NetNS {
	t.Helper()
	n := &NetNS{calls: make(chan func())}
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		made <- err
		if err != nil {
			return
		}
		for f := range n.calls {
			f()
		}
	}()
	err := <-made
	if errors.Is(err, unix.EPERM) {
		t.Skip("needs root to make a network namespace")
	}
	if err != nil {
		t.Fatalf("make a network namespace: %v", err)
	}
	t.Cleanup(func() { close(n.calls) })
	return n
}

// Do runs f in the namespace. Sockets that f makes stay there.
func (n *NetNS) Do(t testing.TB, f func() error) {
	t.Helper()
	done := make(chan error)
	n.calls <- func() { done <- f() }
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// TapFlags are those a virtio network device wants.
const TapFlags = unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR

// tapMAC is the hardware address of every tap: who has talked to one need not ask for that of the next.
var tapMAC = net.HardwareAddr{2, 0, 0, 0, 0xff, 1}

// Tap makes a tap device with the given flags, and, unless addr is empty, up and with that address ("10.0.0.1/24"). It lasts
// as long as the file that is returned, or a duplicate; the test's is closed at its end.
func (n *NetNS) Tap(t testing.TB, name, addr string, flags uint16) *os.File {
	t.Helper()
	var file *os.File
	n.Do(t, func() (err error) {
		file, err = openTap(name, flags)
		return err
	})
	t.Cleanup(func() { _ = file.Close() })
	if addr == "" {
		return file
	}
	n.Do(t, func() error {
		a, err := netlink.ParseAddr(addr)
		if err != nil {
			return err
		}
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(link, a); err != nil {
			return fmt.Errorf("give %s the address %s: %w", name, addr, err)
		}
		if err := netlink.LinkSetHardwareAddr(link, tapMAC); err != nil {
			return fmt.Errorf("give %s its hardware address: %w", name, err)
		}
		return netlink.LinkSetUp(link)
	})
	return file
}

func openTap(name string, flags uint16) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: "/dev/net/tun", Err: err}
	}
	ifr, err := unix.NewIfreq(name)
	if err == nil {
		ifr.SetUint16(flags)
		err = os.NewSyscallError("TUNSETIFF", unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr))
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
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
