// Package kvm is the raw ioctl layer over /dev/kvm on x86-64: one method per ioctl, named after it, nothing else.
//
// File descriptors are types (System, VM, VCPU) that own a raw descriptor; each is closed once, by its owner. Raw integers are
// kept instead of *os.File on purpose: a finalizer that closes a descriptor under a running vCPU would let the number be reused.
//
// Errors are *os.SyscallError values that name the ioctl. A call interrupted by a signal is made again (the Go runtime sends
// signals of its own, and even KVM_CREATE_VM can be hit), with one exception: Run returns what the kernel says, because EINTR
// is how a vCPU is stopped.
//
// Numbers and layouts are those of the Linux headers linux/kvm.h and asm/kvm.h (6.1); sizes are pinned at compile time and
// const_test.go compares every number with the headers of the machine it runs on. The behaviour of each ioctl is described in the
// kernel's Documentation/virt/kvm/api.rst. The package is a leaf: it imports nothing of this module.
package kvm
