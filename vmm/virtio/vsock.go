package virtio

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"torpor/vmm/virtio/mmio"
	"torpor/vmm/virtio/virtq"
)

// The queues of a vsock device.
const (
	vsockRX = iota // to the guest
	vsockTX        // from the guest
	vsockEvent
	vsockQueues
)

const vsockQueueSize = 256

// vsockMaxUntold is how many packets of the guest may be taken before it hears of that; see vsockLimits.settle.
const vsockMaxUntold = 8

// vsockMaxConns is how many connections there are at most, being made and being drained included.
const vsockMaxConns = 1023

// vsockMaxParked is how many clients may wait for connections of the guest.
const vsockMaxParked = 64

// Host ports of connections that the host makes.
const (
	vsockFirstPort = 1 << 30
	vsockPorts     = 1 << 30
)

// Vsock connects sockets of the guest with clients of a unix socket on the host (virtio 1.2, section 5.10).
//
// Host to guest: a client connects and writes "CONNECT <port>\n"; once the guest has accepted, it reads "OK <host port>\n" and
// then the guest's bytes. If the guest refuses, the socket is closed without a word.
//
// Guest to host: a client connects and writes "LISTEN <port>\n"; it reads "OK\n" and is parked. When the guest connects to CID
// 2 and that port, it gets the client that is parked there the longest, or is refused if there is none. One client takes one
// connection. A client that hangs up before is forgotten, one too many is closed without a word.
//
// Each direction of a connection is closed on its own. The device opens no socket of its own accord: all it has is the
// listener it was given.
//
// A snapshot ends all connections on both sides: Save tells the guest by a TRANSPORT_RESET event, which is in guest memory
// before that is saved. From then on, in this machine as in one restored from it, nothing is sent to the guest until it has
// given the event's buffer back: a new connection cannot be mistaken for an old one. Connections made meanwhile wait.
// A pause without a snapshot ends nothing, nor does a snapshot by Copy in this machine.
type Vsock struct {
	cid      uint64
	listener *net.UnixListener
	limits   vsockLimits
	done     chan struct{} // closed by Close
	// tasks are the accept loop and the goroutines of connections; Close waits for them.
	tasks sync.WaitGroup
	// worker is the goroutine that serves the queues while the device is active, for notifications that come by themselves; kick
	// wakes it.
	worker sync.WaitGroup
	kick   chan struct{}

	// mu guards all below, the queues' memory and the connections.
	mu       sync.Mutex
	irq      mmio.Interrupt
	queues   []*virtq.Queue           // nil unless active
	chains   [vsockQueues]virtq.Chain // scratch, one a queue: sending may come amid receiving
	batch    vsockBatch               // scratch
	sent     bool                     // the guest was sent something and not yet interrupted for it
	untold   int                      // packets of the guest taken since it was last interrupted
	settle   *time.Timer              // runs while there are some, and perhaps longer
	settling bool
	paused   bool
	closed   bool
	nextPort uint32
	reset    transportReset

	all    map[*vsockConn]struct{} // every connection there is
	conns  map[vsockKey]*vsockConn // those the guest knows or may come to know
	parked []*vsockConn            // those that wait for the guest, the longest first
	ready  []*vsockConn            // those that may owe the guest a packet, first come first served
	rsts   []vsockReply            // resets owed for packets without a connection
	large  int                     // connections with a large buffer
}

// vsockKey names a connection.
type vsockKey struct{ host, guest uint32 }

// vsockReply is a reset that answers a packet without a connection.
type vsockReply struct {
	vsockKey
	typ uint16
}

var (
	_ mmio.Device = (*Vsock)(nil)
	_ mmio.Copier = (*Vsock)(nil)
	_ mmio.Direct = (*Vsock)(nil)
)

// NewVsock returns the device. Its clients come over the listener, which is the device's from then on, whatever comes of it. cid
// is the guest's address, at least 3. Close ends it.
func NewVsock(cid uint64, listener *net.UnixListener) (*Vsock, error) {
	return newVsockWithin(vsockDefaultLimits, cid, listener)
}

func newVsockWithin(limits vsockLimits, cid uint64, listener *net.UnixListener) (*Vsock, error) {
	if cid <= hostCID || cid >= 1<<32-1 {
		return nil, errors.Join(fmt.Errorf("vsock: %d cannot be a guest's context id", cid), listener.Close())
	}
	v := &Vsock{
		cid: cid, listener: listener, limits: limits, done: make(chan struct{}),
		nextPort: rand.Uint32N(vsockPorts),
		all:      map[*vsockConn]struct{}{},
		conns:    map[vsockKey]*vsockConn{},
	}
	v.settle = time.AfterFunc(limits.settle, v.settled)
	v.tasks.Go(v.accept)
	return v, nil
}

// Close ends all connections and closes the listener. The device does nothing useful afterwards.
func (v *Vsock) Close() error {
	err := v.listener.Close()
	v.mu.Lock()
	if !v.closed {
		v.closed = true
		close(v.done)
	}
	for c := range v.all {
		v.killLocked(c)
	}
	v.mu.Unlock()
	v.settle.Stop()
	v.tasks.Wait()
	return err
}

// ID implements mmio.Device.
func (v *Vsock) ID() uint32 { return idVsock }

// Features implements mmio.Device: stream sockets need none.
func (v *Vsock) Features() uint64 { return 0 }

// QueueSizes implements mmio.Device.
func (v *Vsock) QueueSizes() []uint16 {
	return []uint16{vsockRX: vsockQueueSize, vsockTX: vsockQueueSize, vsockEvent: vsockQueueSize}
}

// ReadConfig implements mmio.Device: the guest's context id is all there is.
func (v *Vsock) ReadConfig(off uint64, p []byte) {
	readConfig(binary.LittleEndian.AppendUint64(nil, v.cid), off, p)
}

// WriteConfig implements mmio.Device: nothing can be written.
func (v *Vsock) WriteConfig(uint64, []byte) {}

// Activate implements mmio.Device.
func (v *Vsock) Activate(_ uint64, queues []*virtq.Queue, irq mmio.Interrupt) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.queues, v.irq = queues, irq
	kick := make(chan struct{}, 1)
	v.kick = kick
	v.worker.Go(func() {
		for range kick {
			v.serve()
		}
	})
	return nil
}

// Notify implements mmio.Device.
func (v *Vsock) Notify(int) {
	select {
	case v.kick <- struct{}{}:
	default: // the worker has yet to take an earlier one
	}
}

// Waits implements mmio.Direct: nothing does.
func (v *Vsock) Waits(int) bool { return false }

// Serve implements mmio.Direct.
func (v *Vsock) Serve(int) func() { return v.serve }

// Reset implements mmio.Device. It ends all connections.
func (v *Vsock) Reset() {
	close(v.kick)
	v.worker.Wait()
	v.mu.Lock()
	defer v.mu.Unlock()
	v.dropLocked()
	v.queues, v.irq, v.paused, v.reset, v.untold, v.sent = nil, nil, false, transportReset{}, 0, false
}

// Pause implements mmio.Device. Connections stay, and what the host sends waits.
func (v *Vsock) Pause() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.paused = true
	return nil
}

// Resume implements mmio.Device.
func (v *Vsock) Resume() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.paused = false
	return nil
}

// dropLocked ends all connections the guest may know, without a word to it. What it has finished sending still goes out. Parked
// clients stay.
func (v *Vsock) dropLocked() {
	for _, c := range v.conns {
		v.killLocked(c)
	}
	v.ready, v.rsts = nil, nil
}

// vsockState is what Save returns, little-endian.
type vsockState struct {
	Version  uint16
	Owed     uint16
	Awaited  uint16
	SeenIdx  uint16
	NextPort uint32
}

const vsockStateVersion = 1

// Save implements mmio.Device. It ends all connections and tells the guest so.
func (v *Vsock) Save() ([]byte, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.dropLocked()
	v.reset.owe()
	// A broken event queue is no reason not to save: the guest is told when it has reset the device.
	if err := v.tellResetLocked(); err != nil && !errors.Is(err, virtq.ErrBroken) {
		return nil, fmt.Errorf("save vsock: %w", err)
	}
	return v.stateLocked(v.reset)
}

// Copy implements mmio.Copier: the connections are ended for a device that loads it, which tells the guest when it resumes.
func (v *Vsock) Copy() ([]byte, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	reset := v.reset
	reset.owe()
	return v.stateLocked(reset)
}

func (v *Vsock) stateLocked(r transportReset) ([]byte, error) {
	return binary.Append(nil, binary.LittleEndian, vsockState{
		vsockStateVersion, flag16(r.owed), flag16(r.awaited), r.seenIdx, v.nextPort,
	})
}

// Load implements mmio.Device.
func (v *Vsock) Load(state []byte) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	var s vsockState
	switch n, err := binary.Decode(state, binary.LittleEndian, &s); {
	case err != nil || n != len(state):
		return errors.New("load vsock: state has a wrong size")
	case s.Version != vsockStateVersion:
		return fmt.Errorf("load vsock: state is of version %d, this program reads %d", s.Version, vsockStateVersion)
	}
	v.reset = transportReset{owed: s.Owed != 0, awaited: s.Awaited != 0, seenIdx: s.SeenIdx}
	// The guest may still hold sockets on ports handed out before: never the same again, and not the same in two clones.
	const stride = 1 << 16
	v.nextPort = (s.NextPort + 1 + rand.Uint32N(stride)) % vsockPorts
	v.paused = true
	return nil
}

func flag16(b bool) uint16 {
	if b {
		return 1
	}
	return 0
}
