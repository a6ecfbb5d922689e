package mmio

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"torpor/vmm/guestmem"
	"torpor/vmm/virtio/virtq"
)

// Size is the size of a device's window of guest addresses, in bytes.
const Size = 0x1000

// Features that are not a device's own (virtio 1.2, section 6). Every device has EVENT_IDX and VERSION_1.
const (
	FeatureIndirect uint64 = 1 << 28 // of those devices that offer it
	FeatureEventIdx uint64 = 1 << 29
	FeatureVersion1 uint64 = 1 << 32
)

// Status bits (virtio 1.2, section 2.1).
const (
	statusAcknowledge = 1
	statusDriver      = 2
	statusDriverOK    = 4
	statusFeaturesOK  = 8
	statusNeedsReset  = 64
	statusFailed      = 128
)

// Interrupt status bits.
const (
	interruptUsed   = 1
	interruptConfig = 2
)

// ErrNotPaused means that a call needs a paused device.
var ErrNotPaused = errors.New("virtio device is not paused")

// Transport is one device's register file. It is safe for concurrent use.
type Transport struct {
	dev    Device
	mem    *guestmem.Memory
	signal func()

	// The device's goroutines set these without the lock: a reset waits for them while holding it.
	interrupt  atomic.Uint32
	generation atomic.Uint32
	needsReset atomic.Bool

	mu             sync.Mutex
	status         uint32
	deviceSelect   uint32
	driverSelect   uint32
	queueSelect    uint32
	driverFeatures uint64
	setups         []queueSetup
	queues         []*virtq.Queue // nil unless the device is active
	paused         bool
}

// queueSetup is what the driver wrote about one queue.
type queueSetup struct {
	virtq.Config
	max   uint16
	ready bool
}

// NewTransport returns the register file of dev, reset. signal raises the device's interrupt line; it must not block.
func NewTransport(dev Device, mem *guestmem.Memory, signal func()) *Transport {
	t := &Transport{dev: dev, mem: mem, signal: signal}
	t.clearLocked()
	return t
}

// Notify tells the device that the driver notified a queue.
func (t *Transport) Notify(queue int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.queues != nil && !t.paused && queue >= 0 && queue < len(t.queues) {
		t.dev.Notify(queue)
	}
}

// Serve is Notify for a queue of a Direct device: it returns when the work that was to be done here is.
func (t *Transport) Serve(queue int) {
	if work := t.work(queue); work != nil {
		work()
	}
}

func (t *Transport) work(queue int) func() {
	t.mu.Lock()
	defer t.mu.Unlock()
	d, ok := t.dev.(Direct)
	if !ok || t.queues == nil || t.paused || queue < 0 || queue >= len(t.queues) {
		return nil
	}
	return d.Serve(queue)
}

// Pause returns when the device touches guest memory no more. Notifications are ignored from then on; Resume makes up for
// them. Pausing again does nothing.
func (t *Transport) Pause() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.paused {
		return nil
	}
	if t.queues != nil {
		if err := t.dev.Pause(); err != nil {
			return fmt.Errorf("pause virtio device %d: %w", t.dev.ID(), err)
		}
	}
	t.paused = true
	return nil
}

// Resume lets a paused or loaded device go on. Every queue is notified, since a notification may have been lost, and the
// driver is interrupted, since an interrupt may have been. Resuming a running device does nothing.
func (t *Transport) Resume() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.paused {
		return nil
	}
	if t.queues != nil {
		if err := t.dev.Resume(); err != nil {
			return fmt.Errorf("resume virtio device %d: %w", t.dev.ID(), err)
		}
		for i := range t.queues {
			t.dev.Notify(i)
		}
		t.Interrupt().Used()
		if t.needsReset.Load() {
			t.Interrupt().Config()
		}
	}
	t.paused = false
	return nil
}

// Close ends the device's work as a reset does.
func (t *Transport) Close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.resetLocked()
}

// InterruptStatus is the register at StatusOffset, for who answers reads of it, and writes at AckOffset, without coming here.
func (t *Transport) InterruptStatus() *atomic.Uint32 { return &t.interrupt }

// Interrupt returns the device's way to its driver.
func (t *Transport) Interrupt() Interrupt { return (*line)(t) }

// line is Transport with Interrupt's methods.
type line Transport

func (l *line) raise(bit uint32) {
	l.interrupt.Or(bit)
	l.signal()
}

func (l *line) Used() { l.raise(interruptUsed) }

func (l *line) Config() {
	l.generation.Add(1)
	l.raise(interruptConfig)
}

func (l *line) NeedsReset() {
	if !l.needsReset.Swap(true) {
		l.Config()
	}
}

func (t *Transport) clearLocked() {
	t.status, t.deviceSelect, t.driverSelect, t.queueSelect, t.driverFeatures = 0, 0, 0, 0, 0
	sizes := t.dev.QueueSizes()
	t.setups = make([]queueSetup, len(sizes))
	for i, n := range sizes {
		t.setups[i] = queueSetup{max: n, Config: virtq.Config{Size: n}}
	}
	t.queues = nil
	t.interrupt.Store(0)
	t.needsReset.Store(false)
}

func (t *Transport) resetLocked() {
	if t.queues != nil {
		t.dev.Reset()
	}
	t.clearLocked()
}

// offered is what the driver may choose from.
func (t *Transport) offered() uint64 { return t.dev.Features() | FeatureVersion1 | FeatureEventIdx }

// buildLocked makes the queues the driver described. All that exist with the negotiated features are required.
func (t *Transport) buildLocked() ([]*virtq.Queue, error) {
	required := len(t.setups)
	if d, ok := t.dev.(Selective); ok {
		required = min(required, d.QueuesWith(t.driverFeatures))
	}
	queues := make([]*virtq.Queue, required)
	for i, s := range t.setups[:required] {
		if !s.ready {
			return nil, fmt.Errorf("queue %d was not set up", i)
		}
		q, err := virtq.New(t.mem, s.Config, virtq.Features{
			EventIdx: t.driverFeatures&FeatureEventIdx != 0, Indirect: t.driverFeatures&FeatureIndirect != 0,
		})
		if err != nil {
			return nil, fmt.Errorf("queue %d: %w", i, err)
		}
		queues[i] = q
	}
	return queues, nil
}

func (t *Transport) activateLocked() {
	queues, err := t.buildLocked()
	if err == nil {
		err = t.dev.Activate(t.driverFeatures, queues, t.Interrupt())
	}
	if err != nil {
		t.Interrupt().NeedsReset()
		return
	}
	t.queues = queues
}
