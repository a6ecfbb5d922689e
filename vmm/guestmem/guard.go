package guestmem

import "runtime/debug"

// Guard runs f, which touches the guest bytes b, and reports whether it finished. False: a page of b could not be accessed
// (SIGBUS or SIGSEGV on it) and f was cut short. Any other panic of f goes on.
func Guard(b []byte, f func()) (ok bool) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if ok {
			return
		}
		r := recover()
		if r == nil {
			return // Goexit
		}
		// The runtime's error for a memory fault, and no other, has the address.
		fault, isFault := r.(interface{ Addr() uintptr })
		start := hostAddr(b)
		if !isFault || fault.Addr() < start || fault.Addr() >= start+uintptr(len(b)) {
			panic(r)
		}
	}()
	f()
	return true
}
