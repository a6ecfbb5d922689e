package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// loadModules loads the modules listed in modulesPath, one path a line, in that order.
func loadModules() error {
	list, err := os.ReadFile(modulesPath)
	if err != nil {
		return err
	}
	for path := range strings.FieldsSeq(string(list)) {
		if err := loadModule(path); err != nil {
			return fmt.Errorf("load %s: %w", path, err)
		}
	}
	return nil
}

func loadModule(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	err = unix.FinitModule(int(f.Fd()), "", 0)
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	return err
}

// raiseLimits gives every process as many open files as a server would have.
func raiseLimits() error {
	const files = 1 << 20
	return unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: files, Max: files})
}

// The address that QEMU's user networking forwards to.
const hostAddress = "10.0.2.15/24"

func bringUpNetwork() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("bring up lo: %w", err)
	}
	eth, err := netlink.LinkByName("eth0")
	if err != nil {
		return fmt.Errorf("find eth0: %w", err)
	}
	addr, err := netlink.ParseAddr(hostAddress)
	if err != nil {
		return err
	}
	if err := netlink.AddrAdd(eth, addr); err != nil {
		return fmt.Errorf("add %s to eth0: %w", hostAddress, err)
	}
	if err := netlink.LinkSetUp(eth); err != nil {
		return fmt.Errorf("bring up eth0: %w", err)
	}
	// Like any host it has a default route; QEMU drops what is sent there.
	route := &netlink.Route{LinkIndex: eth.Attrs().Index, Gw: net.IPv4(10, 0, 2, 2)}
	if err := netlink.RouteAdd(route); err != nil {
		return fmt.Errorf("add the default route: %w", err)
	}
	return nil
}
