package guestmem

import (
	"sync/atomic"
	"unsafe"
)

// wordSize is the smallest unit sync/atomic knows, in bytes. Halves of it are reached through it; regions are whole words.
const wordSize = 4

func hostAddr(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// Preconditions: len(b) is wordSize, b is aligned to it, and off is 0 or 2. The machine is little-endian, as the guest is.
func loadHalf(b []byte, off int) uint16 {
	return uint16(atomic.LoadUint32((*uint32)(unsafe.Pointer(unsafe.SliceData(b)))) >> (8 * off))
}

// Preconditions: as for loadHalf.
func storeHalf(b []byte, off int, v uint16) {
	word := (*uint32)(unsafe.Pointer(unsafe.SliceData(b)))
	for {
		old := atomic.LoadUint32(word)
		changed := old&^(0xffff<<(8*off)) | uint32(v)<<(8*off)
		if atomic.CompareAndSwapUint32(word, old, changed) {
			return
		}
	}
}
