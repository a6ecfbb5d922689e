package virtq

// Memory is what a queue needs of the guest's RAM; addresses are guest-physical. *guestmem.Memory is one.
//
// Every call checks its range by itself and fails, without a panic, where there is no RAM or it cannot be accessed. The guest runs
// meanwhile: ReadAt and WriteAt promise nothing about the order in which bytes are seen.
type Memory interface {
	// Contains reports whether n bytes at addr are RAM without a gap.
	Contains(addr, n uint64) bool
	// Slice is the n bytes at addr where they lie in this process, for a system call to read or write.
	Slice(addr, n uint64) ([]byte, error)
	// ReadAt fills p from the bytes at addr.
	ReadAt(p []byte, addr uint64) error
	// WriteAt copies p to the bytes at addr.
	WriteAt(p []byte, addr uint64) error
	// LoadUint16 reads a little-endian value at an even address. What the driver wrote before the value is seen by later reads.
	LoadUint16(addr uint64) (uint16, error)
	// StoreUint16 writes a little-endian value at an even address, between full barriers: the driver that sees the value sees all
	// that was written before it, and what it wrote before it looked is seen by later reads.
	StoreUint16(addr uint64, v uint16) error
}
