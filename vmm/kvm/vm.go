package kvm

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// VM is one virtual machine.
type VM struct {
	fd       int
	runBytes int // size of a vCPU's kvm_run mapping
}

// Close closes the descriptor. The kernel frees the VM when its vCPUs are closed too.
func (vm *VM) Close() error { return closeFD(vm.fd) }

// Extension issues KVM_CHECK_EXTENSION on the VM, whose answer can differ from the system's.
func (vm *VM) Extension(c Cap) (int, error) {
	n, err := ioctlInt(vm.fd, checkExtension, uintptr(c))
	return int(n), err
}

// SetTSSAddr issues KVM_SET_TSS_ADDR: three pages below 4 GiB that Intel CPUs without unrestricted guests need.
func (vm *VM) SetTSSAddr(addr uint64) error {
	_, err := ioctlInt(vm.fd, setTSSAddr, uintptr(addr))
	return err
}

// SetIdentityMapAddr issues KVM_SET_IDENTITY_MAP_ADDR: one page, for the same CPUs.
func (vm *VM) SetIdentityMapAddr(addr uint64) error {
	_, err := ioctlPtr(vm.fd, setIdentityMapAddr, &addr)
	return err
}

// CreateIRQChip issues KVM_CREATE_IRQCHIP: local APICs, an I/O APIC and two PICs in the kernel. Before any vCPU.
func (vm *VM) CreateIRQChip() error {
	_, err := ioctlInt(vm.fd, createIRQChip, 0)
	return err
}

// IRQChip issues KVM_GET_IRQCHIP for one chip.
func (vm *VM) IRQChip(id uint32) (IRQChip, error) {
	c := IRQChip{ID: id}
	_, err := ioctlPtr(vm.fd, getIRQChip, &c)
	return c, err
}

// SetIRQChip issues KVM_SET_IRQCHIP.
func (vm *VM) SetIRQChip(c *IRQChip) error {
	_, err := ioctlPtr(vm.fd, setIRQChip, c)
	return err
}

// IRQLine issues KVM_IRQ_LINE: it sets the level of the GSI's line, 0 or 1. An interrupt that it causes is pending when it returns.
func (vm *VM) IRQLine(gsi, level uint32) error {
	return vm.setLine(&irqLevel{irq: gsi, level: level})
}

// IOEventFD issues KVM_IOEVENTFD: a 4-byte guest write of the value match at addr (MMIO) signals the eventfd instead of
// leaving KVM_RUN.
func (vm *VM) IOEventFD(eventfd int, addr uint64, match uint32) error {
	_, err := ioctlPtr(vm.fd, ioeventfd, &ioeventfdArg{
		datamatch: uint64(match), addr: addr, len: 4, fd: int32(eventfd), flags: ioeventfdDatamatch,
	})
	return err
}

// Clock issues KVM_GET_CLOCK.
func (vm *VM) Clock() (Clock, error) {
	var c Clock
	_, err := ioctlPtr(vm.fd, getClock, &c)
	return c, err
}

// SetClock issues KVM_SET_CLOCK with flags 0: the guest's monotonic clock goes on from ns, however long it stood still.
func (vm *VM) SetClock(ns uint64) error {
	_, err := ioctlPtr(vm.fd, setClock, &Clock{Clock: ns})
	return err
}

// CreateVCPU issues KVM_CREATE_VCPU and maps its kvm_run page. id is also the initial APIC id.
func (vm *VM) CreateVCPU(id int) (*VCPU, error) {
	fd, err := ioctlInt(vm.fd, createVCPU, uintptr(id))
	if err != nil {
		return nil, err
	}
	page, err := unix.Mmap(int(fd), 0, vm.runBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, closeOn(os.NewSyscallError("mmap kvm_run", err), func() error { return closeFD(int(fd)) })
	}
	// A copy of the process, which is a view of memory, could do nothing with it but keep the VM alive.
	if err := unix.Madvise(page, unix.MADV_DONTFORK); err != nil {
		return nil, errors.Join(os.NewSyscallError("madvise kvm_run", err), unix.Munmap(page), closeFD(int(fd)))
	}
	return &VCPU{fd: int(fd), page: page}, nil
}
