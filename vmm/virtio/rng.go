package virtio

import (
	"golang.org/x/sys/unix"

	"torpor/vmm/virtio/mmio"
	"torpor/vmm/virtio/virtq"
)

// rngMax is the most one request gets, in bytes. A driver asks again for more.
const rngMax = 64 << 10

// RNG gives the guest random bytes of the host kernel (virtio 1.2, section 5.4).
type RNG struct {
	server *server // nil unless active
	paused bool
}

var _ mmio.Device = (*RNG)(nil)

// NewRNG returns the device.
func NewRNG() *RNG { return &RNG{} }

// ID implements mmio.Device.
func (r *RNG) ID() uint32 { return idRNG }

// Features implements mmio.Device: there are none.
func (r *RNG) Features() uint64 { return 0 }

// QueueSizes implements mmio.Device.
func (r *RNG) QueueSizes() []uint16 { return []uint16{64} }

// ReadConfig implements mmio.Device: there is nothing to read.
func (r *RNG) ReadConfig(uint64, []byte) {}

// WriteConfig implements mmio.Device: nothing can be written.
func (r *RNG) WriteConfig(uint64, []byte) {}

// Activate implements mmio.Device.
func (r *RNG) Activate(_ uint64, queues []*virtq.Queue, irq mmio.Interrupt) error {
	r.server = startServer(queues[0], irq, r.paused, 1, rngMax, fillRandom)
	return nil
}

func fillRandom(c *virtq.Chain, buf []byte) uint32 {
	buf = buf[:min(c.WriteLen(), rngMax)]
	for done := 0; done < len(buf); {
		n, err := unix.Getrandom(buf[done:], 0)
		if err != nil && err != unix.EINTR {
			return 0
		}
		done += max(n, 0)
	}
	if c.WriteAt(buf, 0) != nil {
		return 0
	}
	return uint32(len(buf))
}

// Notify implements mmio.Device.
func (r *RNG) Notify(int) { r.server.kick() }

// Reset implements mmio.Device.
func (r *RNG) Reset() {
	r.server.stop()
	*r = RNG{}
}

// Pause implements mmio.Device.
func (r *RNG) Pause() error {
	r.server.pause()
	return nil
}

// Resume implements mmio.Device.
func (r *RNG) Resume() error {
	r.server.resume()
	return nil
}

// Save implements mmio.Device: all that matters is in the queue.
func (r *RNG) Save() ([]byte, error) { return nil, nil }

// Load implements mmio.Device.
func (r *RNG) Load(state []byte) error {
	r.paused = true
	return loadEmpty(state)
}
