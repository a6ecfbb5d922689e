package kvm

import (
	"errors"
	"os"
	"runtime"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// maxAgain bounds retries of EAGAIN, which KVM gives while a helper thread of its own is being created.
const maxAgain = 100

// retry reports whether an ioctl that gave errno is made again; again counts the EAGAINs so far.
func retry(errno unix.Errno, again *int) bool {
	switch {
	case errno == unix.EINTR:
		return true
	case errno == unix.EAGAIN && *again < maxAgain:
		*again++
		runtime.Gosched()
		return true
	}
	return false
}

// ioctlInt issues an ioctl whose argument is a plain number.
func ioctlInt(fd int, r request, arg uintptr) (uintptr, error) {
	for again := 0; ; {
		n, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(r), arg)
		if errno == 0 {
			return n, nil
		}
		if !retry(errno, &again) {
			return n, os.NewSyscallError(r.String(), errno)
		}
	}
}

// ioctlPtr issues an ioctl whose argument is a struct; the kernel may write to it.
func ioctlPtr[T any](fd int, r request, arg *T) (uintptr, error) {
	for again := 0; ; {
		n, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(r), uintptr(unsafe.Pointer(arg)))
		if errno == 0 {
			return n, nil
		}
		if !retry(errno, &again) {
			return n, os.NewSyscallError(r.String(), errno)
		}
	}
}

// SetMemoryRegion issues KVM_SET_USER_MEMORY_REGION: mem becomes guest RAM at guestPhys in the given slot. The mapping must
// stay until the VM is closed; mem and guestPhys are page-aligned.
func (vm *VM) SetMemoryRegion(slot uint32, guestPhys uint64, mem []byte) error {
	if len(mem) == 0 {
		return errors.New("kvm: empty memory region")
	}
	_, err := ioctlPtr(vm.fd, setUserMemory, &userMemory{
		slot: slot, guestPhys: guestPhys, size: uint64(len(mem)),
		userspaceAddr: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))),
	})
	return err
}

// TSCOffset reads the vCPU attribute KVM_VCPU_TSC_OFFSET: what is added to the host's TSC. Kernels before 5.16 have none.
func (v *VCPU) TSCOffset() (uint64, error) {
	off := new(uint64)
	err := v.tscOffset(getDeviceAttr, off)
	return *off, err
}

// SetTSCOffset writes the vCPU attribute KVM_VCPU_TSC_OFFSET.
func (v *VCPU) SetTSCOffset(off uint64) error { return v.tscOffset(setDeviceAttr, &off) }

func (v *VCPU) tscOffset(r request, off *uint64) error {
	// The address travels inside a struct, where neither the collector nor a growing stack would follow it.
	var pin runtime.Pinner
	pin.Pin(off)
	defer pin.Unpin()
	_, err := ioctlPtr(v.fd, r, &deviceAttr{
		group: vcpuTSCCtrl, attr: vcpuTSCOffset, addr: uint64(uintptr(unsafe.Pointer(off))),
	})
	return err
}

// XSave issues KVM_GET_XSAVE2 into an area of n bytes (Extension(CapXSave2), at least 4096), or KVM_GET_XSAVE where n is 4096.
func (v *VCPU) XSave(n int) ([]byte, error) {
	buf := make([]byte, max(n, xsaveBytes))
	r := getXSave
	if n > xsaveBytes {
		r = getXSave2
	}
	_, err := ioctlPtr(v.fd, r, unsafe.SliceData(buf))
	return buf, err
}

// SetXSave issues KVM_SET_XSAVE. area is what XSave gave on a VM with the same CapXSave2 size.
func (v *VCPU) SetXSave(area []byte) error {
	if len(area) < xsaveBytes {
		return errors.New("kvm: xsave area is shorter than 4096 bytes")
	}
	_, err := ioctlPtr(v.fd, setXSave, unsafe.SliceData(area))
	return err
}

// SetImmediateExit sets or clears kvm_run.immediate_exit: while set, KVM_RUN only completes the I/O of the last exit and
// returns EINTR. It may be called from any goroutine while the vCPU runs.
func (v *VCPU) SetImmediateExit(on bool) {
	// Bytes 0-3 are request_interrupt_window, which nobody here uses, immediate_exit and padding, so one aligned word store
	// reaches just the flag.
	var word uint32
	if on {
		word = 1 << (8 * runImmediateExit)
	}
	atomic.StoreUint32((*uint32)(unsafe.Pointer(unsafe.SliceData(v.page))), word)
}

// setLine issues KVM_IRQ_LINE, which does not wait: the scheduler is not told of it, or its monitor would wake (see enter).
func (vm *VM) setLine(l *irqLevel) error {
	_, _, errno := unix.RawSyscall(unix.SYS_IOCTL, uintptr(vm.fd), uintptr(irqLine), uintptr(unsafe.Pointer(l)))
	if errno != 0 {
		return os.NewSyscallError(irqLine.String(), errno)
	}
	return nil
}
