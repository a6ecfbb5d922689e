// Package kvm is the raw ioctl layer over /dev/kvm on x86-64: one method per ioctl, named after it, nothing else.
//
// File descriptors are types (System, VM, VCPU) that own a raw descriptor; each is closed once, by its owner. Raw integers are
// kept instead of *os.File on purpose: a finalizer that closes a descriptor under a running vCPU would let the number be reused.
//
// Errors are *os.SyscallError values that name the ioctl. A call interrupted by a signal is made again (the Go runtime sends
// signals of its own, and even KVM_CREATE_VM can be hit), with one exception: Run returns what the kernel says, because EINTR
// is how a vCPU is stopped.
//
// Where things come from: ioctl numbers, capabilities, exit reasons and struct kvm_run from linux/kvm.h, register structs from
// asm/kvm.h, both of Linux 6.1; what each ioctl does, Documentation/virt/kvm/api.rst under the ioctl's own name. Sizes, offsets and
// the sizes inside ioctl numbers are pinned at compile time (abi_unsafe.go), and const_internal_test.go compares every number with
// the headers of the machine it runs on. The package is a leaf: it imports nothing of this module.
//
//	const.go           ioctl numbers and names, capabilities, exit reasons
//	abi.go             the kernel's structs; abi_unsafe.go pins them
//	system.go vm.go    the methods, by the kind of descriptor
//	vcpu.go exit.go    a vCPU, and what kvm_run says of an exit
//	ioctl_unsafe.go    the call itself, and the few methods that hand over addresses
package kvm
