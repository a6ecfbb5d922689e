package machine

import (
	"sync"

	"torpor/vmm/kvm"
)

// irqLine is a device's interrupt line, edge-triggered. It is pulled by ioctl and not through an irqfd: that costs two system calls
// where the other costs one, but an interrupt that passes the I/O APIC is injected by the caller's thread, while an irqfd leaves it to
// a worker of the kernel, whose turn comes when the scheduler finds one.
type irqLine struct {
	vm  *kvm.VM
	gsi uint32
	mu  sync.Mutex // an edge is not made while another one is: the line would be up already
}

// signal raises an edge. It does not block for longer than another one takes.
func (l *irqLine) signal() {
	l.mu.Lock()
	defer l.mu.Unlock()
	// They cannot fail: the line exists, and the VM is there for longer than its devices.
	_ = l.vm.IRQLine(l.gsi, 1)
	_ = l.vm.IRQLine(l.gsi, 0)
}
