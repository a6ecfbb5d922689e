package main

import "unsafe"

// overwrite puts value and zero bytes where the bytes of arg are. arg is an element of os.Args, which the Go runtime does not copy:
// its bytes are those that the kernel laid on the first stack, and may be written.
func overwrite(arg, value string) {
	b := unsafe.Slice(unsafe.StringData(arg), len(arg))
	clear(b[copy(b, value):])
}
