package jail

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Lock puts the filter on every thread of the process there is and will be. It lets through the ioctl requests given, what the
// Go runtime needs, and the use of files that are open; whatever else is tried ends the process with SIGSYS. There is no way back.
// The kernel's log names the call (audit records of type 1326).
func Lock(ioctls []uint32) error {
	if builtWithCgo {
		return errors.New("jail: the filter is for the threads of Go's own runtime: build with CGO_ENABLED=0")
	}
	program, err := assemble(rules(ioctls))
	if err != nil {
		return err
	}
	runtime.LockOSThread() // the promise and the filter that needs it must come from one thread
	defer runtime.UnlockOSThread()
	if err := noNewPrivileges(); err != nil {
		return fmt.Errorf("jail: %w", err)
	}
	// Nobody of the same user may look into the process, and no core is dumped.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("jail: %w", os.NewSyscallError("prctl PR_SET_DUMPABLE", err))
	}
	p := &unix.SockFprog{Len: uint16(len(program)), Filter: unsafe.SliceData(program)}
	var pin runtime.Pinner // its address travels inside a struct
	pin.Pin(p.Filter)
	defer pin.Unpin()
	thread, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(p)))
	if errno != 0 {
		return fmt.Errorf("jail: %w", os.NewSyscallError("seccomp", errno))
	}
	if thread != 0 { // seccomp(2): a thread that could not be brought in line
		return fmt.Errorf("jail: thread %d has a filter of its own", thread)
	}
	return nil
}
