// Package mmio is the virtio-mmio transport, version 2 (virtio 1.2, section 4.2): the register file between a guest's driver
// and a device, and the device's life: negotiation, activation, pause, snapshot, reset.
//
// The guest may write anything to any register at any time. Writes that the current state does not allow are ignored; a
// driver that set up nonsense gets DEVICE_NEEDS_RESET.
package mmio

import "torpor/vmm/virtio/virtq"

// Device is what stands behind a transport. The transport calls it with its own lock held, one call at a time; only the
// device's own goroutines run beside that. They may use the Interrupt at any time.
//
// Life: Activate starts it; Reset ends that and waits for what is in flight. Pause stops all access to guest memory and
// Resume undoes that; every queue is notified after it. Save comes only after Pause. Load comes only before Activate and
// leaves the device paused.
type Device interface {
	// ID is the device type (virtio 1.2, section 5).
	ID() uint32
	// Features are the device's own, and INDIRECT_DESC if its requests are long; the transport adds VERSION_1 and EVENT_IDX.
	Features() uint64
	// QueueSizes are the sizes of the queues, powers of two; the driver may choose smaller ones.
	QueueSizes() []uint16
	// ReadConfig fills p from the configuration space at off; beyond its end p is left alone.
	ReadConfig(off uint64, p []byte)
	// WriteConfig is a driver's write to the configuration space.
	WriteConfig(off uint64, p []byte)
	// Activate hands over the negotiated features and all queues. On error the driver is told to reset the device.
	Activate(features uint64, queues []*virtq.Queue, irq Interrupt) error
	// Notify says that a queue may have news. It never blocks: it runs on a vCPU's thread.
	Notify(queue int)
	// Reset returns the device to where it was before Activate.
	Reset()
	// Pause returns when nothing touches guest memory any more and nothing is in flight.
	Pause() error
	// Resume lets a paused device go on.
	Resume() error
	// Save returns the device's own state. It may still write to guest memory.
	Save() ([]byte, error)
	// Load takes the state an earlier device returned from Save. It is checked like anything read from a file.
	Load(state []byte) error
}

// Selective is a Device some of whose queues exist only with a feature. Without this all queues of QueueSizes must be set up.
type Selective interface {
	// QueuesWith says how many queues there are with the negotiated features, the first of those of QueueSizes. The driver may
	// leave the others alone.
	QueuesWith(features uint64) int
}

// Copier is a Device for which Save has consequences.
type Copier interface {
	// Copy is Save for a device that goes on: a device that loads what it returns is in the state that Save would leave, while
	// this one and guest memory stay as they are.
	Copy() ([]byte, error)
}

// Direct is a Device that does its work on the goroutine that got the notification. That saves a hand-over, which can take longer than
// the work.
type Direct interface {
	// Waits reports whether the work of a queue waits inside system calls. Then the goroutine waits for notifications in a thread of
	// its own, too.
	Waits(queue int) bool
	// Serve is Notify, but for what it returns: that does the work, as far as it is to be done there. It is called
	// without the transport's lock, may take its time, and may run when the device has been paused or reset meanwhile.
	Serve(queue int) func()
}

// Interrupt is how a device reaches its driver. It is safe for concurrent use and never blocks.
type Interrupt interface {
	// Used says that a queue has used buffers.
	Used()
	// Config says that the configuration space changed.
	Config()
	// NeedsReset says that the device cannot go on: the driver broke a queue.
	NeedsReset()
}
