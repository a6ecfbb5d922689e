package memview

import "unsafe"

// address is where b lies in this process, which is where it lies in the child.
func address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
