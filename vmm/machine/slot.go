package machine

import (
	"fmt"
	"os"
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
	irq       eventfd
	notify    []*os.File
	waiters   sync.WaitGroup
}

// newSlot wires dev into window number index.
func newSlot(vm *kvm.VM, mem *guestmem.Memory, index int, dev mmio.Device) (_ *slot, err error) {
	s := &slot{name: fmt.Sprintf("virtio %d", index)}
	if s.irq, err = newEventfd(); err != nil {
		return nil, err
	}
	s.transport = mmio.NewTransport(dev, mem, s.irq.signal)
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if err := vm.IRQFD(int(s.irq), x86.VirtioGSI+uint32(index)); err != nil {
		return nil, fmt.Errorf("%s: %w", s.name, err)
	}
	for queue := range dev.QueueSizes() {
		fd, err := newEventfd()
		if err != nil {
			return nil, err
		}
		f := os.NewFile(uintptr(fd), fmt.Sprintf("%s queue %d", s.name, queue))
		s.notify = append(s.notify, f)
		addr := x86.MMIOAddr + uint64(index)*x86.MMIOSlot + notifyOffset
		if err := vm.IOEventFD(int(fd), addr, uint32(queue)); err != nil {
			return nil, fmt.Errorf("%s queue %d: %w", s.name, queue, err)
		}
		s.waiters.Go(func() { s.wait(f, queue) })
	}
	return s, nil
}

// wait passes notifications on until the file is closed. While the device is paused the transport ignores them and makes up
// for them afterwards.
func (s *slot) wait(f *os.File, queue int) {
	var counter [8]byte
	for {
		if _, err := f.Read(counter[:]); err != nil {
			return
		}
		s.transport.Notify(queue)
	}
}

// close ends the device's work and the goroutines. The vCPUs must be gone.
func (s *slot) close() {
	for _, f := range s.notify {
		_ = f.Close()
	}
	s.waiters.Wait()
	s.transport.Close()
	s.irq.close()
}
