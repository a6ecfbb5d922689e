package virtio

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"

	"torpor/vmm/ratelimit"
	"torpor/vmm/virtio/mmio"
	"torpor/vmm/virtio/virtq"
)

// Features of a network device (virtio 1.2, section 5.1.3). "Guest" is what the driver can take, "host" what the device can.
const (
	netCsum      uint64 = 1 << 0
	netGuestCsum uint64 = 1 << 1
	netMAC       uint64 = 1 << 5
	netGuestTSO4 uint64 = 1 << 7
	netGuestTSO6 uint64 = 1 << 8
	netHostTSO4  uint64 = 1 << 11
	netHostTSO6  uint64 = 1 << 12
	netMergeRX   uint64 = 1 << 15
	netStatus    uint64 = 1 << 16
)

// The queues of a network device.
const (
	netRX = iota // to the guest
	netTX        // from the guest
	netQueues
)

const netQueueSize = 256

// netLinkUp is the one bit of the configuration's status in use (section 5.1.4).
const netLinkUp = 1

// MAC is an Ethernet address.
type MAC [6]byte

func (m MAC) String() string { return net.HardwareAddr(m[:]).String() }

// NetStats counts what a network device moved. Frames are as long as the two sides hand them over: with offloads, up to 64 KiB.
type NetStats struct {
	RXFrames, RXBytes uint64 // to the guest
	RXDropped         uint64
	TXFrames, TXBytes uint64 // from the guest
	TXDropped         uint64
}

// netCounters is NetStats while it counts.
type netCounters struct {
	rxFrames, rxBytes, rxDropped atomic.Uint64
	txFrames, txBytes, txDropped atomic.Uint64
}

// NetLimits bound what a network card does, each direction on its own; nil bounds nothing. An operation is a frame, as long as the
// two sides hand it over.
type NetLimits struct {
	RX *ratelimit.Limiter // to the guest
	TX *ratelimit.Limiter // from the guest
}

func (l NetLimits) pause() {
	l.RX.Pause()
	l.TX.Pause()
}

func (l NetLimits) resume() {
	l.RX.Resume()
	l.TX.Resume()
}

// Net is a network card on a tap device (virtio 1.2, section 5.1).
//
// One goroutine for each direction moves frames between the tap and guest memory, without a copy of ours between them; what the guest
// sends goes out at once, where it can, from the goroutine that got the notification. A pause ends all that. What a pause, a full tap or a slow guest leaves undone stays in the queue
// and in the tap. A frame that makes no sense is dropped and counted.
//
// A tap that goes away takes the link down: the guest is told, what it sends is dropped, and the machine lives on.
type Net struct {
	tap   *tap
	mac   MAC
	lost  func(error)
	limit NetLimits                // they outlive resets, or a guest could reset them away
	kicks [netQueues]chan struct{} // Notify to goroutine
	count netCounters
	down  atomic.Bool // the tap has gone away

	rx     *netReceiver // nil unless active, as tx
	tx     *netSender
	irq    mmio.Interrupt
	paused bool
	// stale: the driver believes what was true of the tap before this one.
	stale bool

	quit  chan struct{} // closed to end the goroutines; nil while there are none
	tasks sync.WaitGroup
}

var _ mmio.Direct = (*Net)(nil)

// NewNet returns the card with the given address on an open tap (IFF_TAP, IFF_NO_PI, IFF_VNET_HDR), which becomes non-blocking.
// The file is the device's from here on, and closed if there is an error; one about the file wraps ErrTap. The limits are the
// device's too. If the tap goes away, lost is called with the reason, once, from a goroutine of the device or within Activate. Close ends it.
func NewNet(file *os.File, mac MAC, limits NetLimits, lost func(error)) (*Net, error) {
	if err := checkTap(file); err != nil {
		_ = file.Close()
		return nil, err
	}
	return newNetOn(file, mac, limits, lost, setTapOffloads)
}

// newNetOn is NewNet on anything that keeps frames apart. offload stands for the ioctls of a tap.
func newNetOn(file *os.File, mac MAC, limits NetLimits, lost func(error), offload func(fd int, flags uint) error) (*Net, error) {
	defer func() { _ = file.Close() }() // nothing was written to it
	t, err := openTap(file, offload)
	if err != nil {
		return nil, err
	}
	n := &Net{tap: t, mac: mac, limit: limits, lost: lost}
	for i := range n.kicks {
		n.kicks[i] = make(chan struct{}, 1)
	}
	return n, nil
}

// Close lets go of the tap. The device must not be active any more.
func (n *Net) Close() error { return n.tap.file.Close() }

// Stats returns what was counted so far. It is safe for concurrent use.
func (n *Net) Stats() NetStats {
	c := &n.count
	return NetStats{
		RXFrames: c.rxFrames.Load(), RXBytes: c.rxBytes.Load(), RXDropped: c.rxDropped.Load(),
		TXFrames: c.txFrames.Load(), TXBytes: c.txBytes.Load(), TXDropped: c.txDropped.Load(),
	}
}

// ID implements mmio.Device.
func (n *Net) ID() uint32 { return idNet }

// Features implements mmio.Device.
func (n *Net) Features() uint64 {
	return netMAC | netStatus | netMergeRX | netCsum | netHostTSO4 | netHostTSO6 | netGuestCsum | netGuestTSO4 | netGuestTSO6
}

// QueueSizes implements mmio.Device.
func (n *Net) QueueSizes() []uint16 { return []uint16{netRX: netQueueSize, netTX: netQueueSize} }

// ReadConfig implements mmio.Device: struct virtio_net_config (section 5.1.4) as far as features make it exist.
func (n *Net) ReadConfig(off uint64, p []byte) {
	var status uint16
	if !n.down.Load() {
		status = netLinkUp
	}
	readConfig(binary.LittleEndian.AppendUint16(n.mac[:len(n.mac):len(n.mac)], status), off, p)
}

// WriteConfig implements mmio.Device: nothing can be written.
func (n *Net) WriteConfig(uint64, []byte) {}

// Activate implements mmio.Device. The tap does not know what the driver can take until it is told here, after a restore too.
func (n *Net) Activate(features uint64, queues []*virtq.Queue, irq mmio.Interrupt) error {
	flags, err := tapOffloads(features)
	if err != nil {
		return err
	}
	n.irq = irq
	if err := n.tap.setOffloads(flags); err != nil {
		if !gone(err) {
			return err
		}
		n.lose(fmt.Errorf("%w: %w", errTapGone, err)) // as it may do at any other moment
	}
	n.rx = newNetReceiver(n, queues[netRX], features)
	n.tx = newNetSender(n, queues[netTX], features)
	if n.paused {
		return nil
	}
	return n.start()
}

// Notify implements mmio.Device.
func (n *Net) Notify(queue int) {
	select {
	case n.kicks[queue] <- struct{}{}:
	default: // there is an earlier one to be taken
	}
}

// Waits implements mmio.Direct: nothing does.
func (n *Net) Waits(int) bool { return false }

// Serve implements mmio.Direct.
func (n *Net) Serve(queue int) func() {
	if queue == netTX {
		return n.tx.serve
	}
	n.Notify(queue)
	return nil
}

// Reset implements mmio.Device.
func (n *Net) Reset() {
	n.stop()
	n.rx, n.tx, n.irq, n.paused, n.stale = nil, nil, nil, false, false
	n.limit.resume()
}

// Pause implements mmio.Device.
func (n *Net) Pause() error {
	n.stop()
	n.limit.pause()
	n.paused = true
	return nil
}

// Resume implements mmio.Device.
func (n *Net) Resume() error {
	n.paused = false
	n.limit.resume()
	if n.stale {
		n.stale = false
		n.irq.Config()
	}
	return n.start()
}

func (n *Net) start() error {
	if err := n.tap.release(); err != nil {
		return fmt.Errorf("start network: %w", err)
	}
	quit := make(chan struct{})
	n.quit = quit
	n.tx.start()
	n.tasks.Go(func() { n.rx.run(quit) })
	n.tasks.Go(func() { n.tx.run(quit) })
	return nil
}

// stop returns when neither goroutine runs.
func (n *Net) stop() {
	if n.quit == nil {
		return
	}
	close(n.quit)
	n.tap.interrupt()
	n.tasks.Wait()
	n.tx.stop()
	n.quit = nil
}

// lose takes the link down because of err.
func (n *Net) lose(err error) {
	if n.down.Swap(true) {
		return
	}
	n.irq.Config()
	n.lost(err)
}

// netState is what Save returns, little-endian, before the tokens of the limits: to the guest, then from it. The rest is in the
// queues.
type netState struct {
	Version  uint16
	LinkDown uint16
	MAC      MAC
	RX, TX   uint16 // bytes of the limits' states; not in version 1, which knew no limits
}

const netStateVersion = 2

// Save implements mmio.Device.
func (n *Net) Save() ([]byte, error) {
	rx, tx := n.limit.RX.Save(), n.limit.TX.Save()
	out, err := binary.Append(nil, binary.LittleEndian, netState{
		netStateVersion, flag16(n.down.Load()), n.mac, uint16(len(rx)), uint16(len(tx)),
	})
	return append(append(out, rx...), tx...), err
}

// Load implements mmio.Device. The driver has read the address long ago, so another one would be a lie.
func (n *Net) Load(state []byte) error {
	if len(state) > 2 && binary.LittleEndian.Uint16(state) == 1 {
		state = append(state[:len(state):len(state)], 0, 0, 0, 0)
		state[0] = netStateVersion
	}
	var s netState
	size, err := binary.Decode(state, binary.LittleEndian, &s)
	switch {
	case err != nil || len(state)-size != int(s.RX)+int(s.TX):
		return errors.New("load network: state has a wrong size")
	case s.Version != netStateVersion:
		return fmt.Errorf("load network: state is of version %d, this program reads 1 and %d", s.Version, netStateVersion)
	case s.MAC != n.mac:
		return fmt.Errorf("load network: saved with the address %v, this machine has %v", s.MAC, n.mac)
	}
	n.limit.pause()
	rx, tx := state[size:][:s.RX], state[size:][s.RX:]
	if err := errors.Join(n.limit.RX.Load(rx), n.limit.TX.Load(tx)); err != nil {
		return fmt.Errorf("load network: %w", err)
	}
	n.stale = s.LinkDown != 0
	n.paused = true
	return nil
}
