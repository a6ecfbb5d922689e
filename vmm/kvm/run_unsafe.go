package kvm

import (
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Word is a register that the guest comes back to so often that Run answers it by itself: 4 bytes, read at one guest-physical
// address; what is written at another clears those bits.
type Word struct {
	ReadAddr, ClearAddr uint64
	Value               *atomic.Uint32
}

// SetWords says which registers Run answers. The vCPU must be outside Run.
func (v *VCPU) SetWords(words []Word) { v.words = words }

// Answered returns how many exits Run has answered by itself. It is safe for concurrent use.
func (v *VCPU) Answered() uint64 { return v.answered.Load() }

// These are the runtime's (runtime/proc.go, where they are marked for use by linkname). A system call that package unix makes
// leaves its thread the right to run Go code, which the runtime's monitor has to take away if the call lasts: for that it wakes
// some thousand times a second, and every ten milliseconds it sends the thread a signal, which ends KVM_RUN. A vCPU lasts, so it
// gives that right away beforehand, and the monitor sleeps.

//go:linkname entersyscallblock runtime.entersyscallblock
func entersyscallblock()

//go:linkname exitsyscall runtime.exitsyscall
func exitsyscall()

// enter issues KVM_RUN until there is an exit for somebody else. Between the two calls of the runtime this is no Go code to it:
// nothing there may grow the stack, allocate, or call what might.
//
//go:norace
//go:nosplit
func (v *VCPU) enter() (errno unix.Errno) {
	entersyscallblock()
	for {
		_, _, errno = unix.RawSyscall(unix.SYS_IOCTL, uintptr(v.fd), uintptr(run), 0)
		if errno != 0 || !v.answer() {
			break
		}
	}
	exitsyscall()
	return errno
}

// answer answers the exit if it is an access to one of the words.
//
//go:norace
//go:nosplit
func (v *VCPU) answer() bool {
	if raceEnabled { // the detector's atomic operations are calls
		return false
	}
	page := unsafe.Pointer(unsafe.SliceData(v.page))
	if *(*uint32)(unsafe.Add(page, runExitReason)) != uint32(ExitMMIO) || *(*uint32)(unsafe.Add(page, runMMIOLen)) != 4 {
		return false
	}
	addr := *(*uint64)(unsafe.Add(page, runMMIOAddr))
	write := *(*uint8)(unsafe.Add(page, runMMIOIsWrite)) != 0
	data := (*uint32)(unsafe.Add(page, runMMIOData))
	for i := range v.words {
		w := &v.words[i]
		switch {
		case !write && addr == w.ReadAddr:
			*data = w.Value.Load()
		case write && addr == w.ClearAddr:
			w.Value.And(^*data)
		default:
			continue
		}
		v.answered.Add(1)
		return true
	}
	return false
}
