// Package netns makes network namespaces, and tap devices in them.
package netns

import (
	"fmt"
	"net"
	"os"
	"runtime"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// NS is a network namespace of its own. It is gone once it is closed, and everything made in it is.
type NS struct {
	calls chan func()
}

// New makes a namespace; that needs root.
func New() (*NS, error) {
	n := &NS{calls: make(chan func())}
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		err := os.NewSyscallError("unshare", unix.Unshare(unix.CLONE_NEWNET))
		made <- err
		if err != nil {
			return
		}
		for f := range n.calls {
			f()
		}
	}()
	if err := <-made; err != nil {
		return nil, fmt.Errorf("make a network namespace: %w", err)
	}
	return n, nil
}

// Close lets go of the namespace.
func (n *NS) Close() { close(n.calls) }

// Do runs f in the namespace. Sockets that f makes stay there.
func (n *NS) Do(f func() error) error {
	done := make(chan error)
	n.calls <- func() { done <- f() }
	return <-done
}

// TapFlags are those a virtio network device wants.
const TapFlags = unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR

// tapMAC is the hardware address of every tap: who has talked to one need not ask for that of the next.
var tapMAC = net.HardwareAddr{2, 0, 0, 0, 0xff, 1}

// Tap makes a tap device with the given flags, and, unless addr is empty, up and with that address ("10.0.0.1/24"). It lasts
// as long as the file that is returned, or a duplicate.
func (n *NS) Tap(name, addr string, flags uint16) (file *os.File, err error) {
	err = n.Do(func() error {
		if file, err = openTap(name, flags); err != nil || addr == "" {
			return err
		}
		return configure(name, addr)
	})
	if err != nil && file != nil {
		_ = file.Close() // nothing was written to it
		file = nil
	}
	return file, err
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

func configure(name, addr string) error {
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
}
