package main

import (
	"fmt"
	"net"
	"os"

	"torpor/tools/devbench/peer"
	"torpor/tools/hosttest/netns"
)

// The network between the host and the guest of either VMM, which are never there at the same time.
const (
	tapName    = "devbench"
	tapAddress = "10.77.0.1/24" // tools/devbench/guest has the other one
)

var guestMAC = net.HardwareAddr{2, 0, 0, 0, 0, 1}

// network is a namespace in which the peer listens, and in which taps are made.
type network struct {
	ns *netns.NS
	l  net.Listener
}

func newNetwork() (*network, error) {
	ns, err := netns.New()
	if err != nil {
		return nil, err
	}
	n := &network{ns: ns}
	err = ns.Do(func() error {
		n.l, err = net.Listen("tcp", fmt.Sprintf(":%d", peer.Port))
		return err
	})
	if err != nil {
		ns.Close()
		return nil, err
	}
	go serve(n.l)
	return n, nil
}

func (n *network) close() {
	_ = n.l.Close()
	n.ns.Close()
}

// tap makes a fresh tap, for one machine.
func (n *network) tap() (*os.File, error) { return n.ns.Tap(tapName, tapAddress, netns.TapFlags) }
