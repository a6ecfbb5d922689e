package machine

import (
	"fmt"
	"sync"

	"torpor/vmm/guestmem"
	"torpor/vmm/kvm"
	"torpor/vmm/virtio/mmio"
	"torpor/vmm/x86"
)

// notifyOffset is QueueNotify in the virtio-mmio register file (virtio 1.2, section 4.2.2).
const notifyOffset = 0x50

// slot is one virtio-mmio window: a device's transport, its interrupt line, and a goroutine per queue that takes the guest's
// notifications from an ioeventfd, so that they do not leave KVM_RUN.
type slot struct {
	name      string
	transport *mmio.Transport
	bells     []bell
	waiters   sync.WaitGroup
}

// newSlot wires dev into window number index.
func newSlot(vm *kvm.VM, mem *guestmem.Memory, index int, dev mmio.Device) (_ *slot, err error) {
	irq := &irqLine{vm: vm, gsi: x86.VirtioGSI + uint32(index)}
	s := &slot{name: fmt.Sprintf("virtio %d", index), transport: mmio.NewTransport(dev, mem, irq.signal)}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	for queue := range dev.QueueSizes() {
		newBell, ring := newPolledBell, s.transport.Notify
		if d, ok := dev.(mmio.Direct); ok {
			ring = s.transport.Serve
			if d.Waits(queue) {
				newBell = newThreadBell
			}
		}
		b, err := newBell()
		if err != nil {
			return nil, err
		}
		s.bells = append(s.bells, b)
		addr := x86.MMIOAddr + uint64(index)*x86.MMIOSlot + notifyOffset
		if err := vm.IOEventFD(b.fd(), addr, uint32(queue)); err != nil {
			return nil, fmt.Errorf("%s queue %d: %w", s.name, queue, err)
		}
		s.waiters.Go(func() {
			// While the device is paused the transport ignores notifications and makes up for them afterwards.
			b.serve(func() { ring(queue) })
		})
	}
	return s, nil
}

// threads is how many of its goroutines wait in a thread of their own.
func (s *slot) threads() (n int) {
	for _, b := range s.bells {
		if _, ok := b.(*threadBell); ok {
			n++
		}
	}
	return n
}

// close ends the device's work and the goroutines. The vCPUs must be gone.
func (s *slot) close() {
	for _, b := range s.bells {
		b.silence()
	}
	s.waiters.Wait()
	for _, b := range s.bells {
		b.close()
	}
	s.transport.Close()
}
