// Package guestmem is the only door to a guest's RAM.
//
// A Memory maps guest physical addresses to byte slices of this process. Every access is checked against the regions, so an
// address taken from the guest needs no check before it comes here. A page that cannot be read any more (its file was cut
// short, its disk failed) makes the one access fail with an *AccessError; the process lives on.
//
// The guest runs while we read: a value that decides anything is read once, into private memory, and judged there. Ring
// indices go through the atomic calls, all else through copies.
//
// A Memory is immutable after New and safe for concurrent use. The package is a leaf.
package guestmem

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
)

// Addr is a guest physical address. It is another name for uint64, so that packages that know nothing of this one (virtq) can name
// what they need of a Memory in an interface of their own.
type Addr = uint64

// PageSize is the unit of mapping, in bytes: regions begin and end on it.
const PageSize = 4096

// The causes in an *AccessError.
var (
	ErrRange      = errors.New("outside guest memory")
	ErrMisaligned = errors.New("misaligned")
	ErrFault      = errors.New("page cannot be accessed")
)

// AccessError is an access to guest memory that was not made. It unwraps to ErrRange, ErrMisaligned or ErrFault.
type AccessError struct {
	Addr Addr
	Len  uint64 // bytes
	Err  error
}

func (e *AccessError) Error() string {
	return fmt.Sprintf("guest memory at %#x, %d bytes: %v", uint64(e.Addr), e.Len, e.Err)
}

// Unwrap returns the cause.
func (e *AccessError) Unwrap() error { return e.Err }

// Region is a piece of guest RAM: Bytes appears in the guest at GPA. The mapping belongs to whoever made it and must outlive
// the Memory.
type Region struct {
	GPA   Addr
	Bytes []byte
}

func (r Region) end() Addr { return r.GPA + Addr(len(r.Bytes)) }

// Memory is the RAM of one guest.
type Memory struct {
	regions []Region // ascending, disjoint, never empty
}

// New returns the memory made of the given regions: whole pages, disjoint, none empty. It sorts them by address.
func New(regions []Region) (*Memory, error) {
	if len(regions) == 0 {
		return nil, errors.New("guest memory: no regions")
	}
	sorted := slices.Clone(regions)
	slices.SortFunc(sorted, func(a, b Region) int { return cmp.Compare(a.GPA, b.GPA) })
	for i, r := range sorted {
		n := uint64(len(r.Bytes))
		switch {
		case n == 0 || n%PageSize != 0 || r.GPA%PageSize != 0 || hostAddr(r.Bytes)%wordSize != 0:
			return nil, fmt.Errorf("guest memory: region at %#x of %d bytes is not made of whole pages", uint64(r.GPA), n)
		case uint64(r.GPA)+n < n:
			return nil, fmt.Errorf("guest memory: region at %#x wraps around", uint64(r.GPA))
		case i > 0 && sorted[i-1].end() > r.GPA:
			return nil, fmt.Errorf("guest memory: region at %#x overlaps the one before it", uint64(r.GPA))
		}
	}
	return &Memory{regions: sorted}, nil
}

// Regions returns the regions in ascending order of address. The caller must not change the slice.
func (m *Memory) Regions() []Region { return m.regions }

// Size returns the bytes of RAM, holes not counted.
func (m *Memory) Size() uint64 {
	var n uint64
	for _, r := range m.regions {
		n += uint64(len(r.Bytes))
	}
	return n
}

// HostAddr returns the address in this process of region i, in the order of Regions; KVM's memory slots want it.
func (m *Memory) HostAddr(i int) uintptr { return hostAddr(m.regions[i].Bytes) }

// Contains reports whether n bytes at a lie within one region. No bytes lie within a region if a does.
func (m *Memory) Contains(a Addr, n uint64) bool {
	_, err := m.Slice(a, n)
	return err == nil
}

// Slice returns the n bytes at a, which must lie within one region, for a system call to read or write: that reports a bad
// page as EFAULT. Go code that touches the bytes itself does so within Guard.
func (m *Memory) Slice(a Addr, n uint64) ([]byte, error) {
	for _, r := range m.regions {
		if a < r.GPA || a >= r.end() {
			continue
		}
		off := uint64(a - r.GPA)
		if n > uint64(len(r.Bytes))-off {
			break
		}
		return r.Bytes[off : off+n : off+n], nil
	}
	return nil, &AccessError{Addr: a, Len: n, Err: ErrRange}
}

// ReadAt fills p from the guest's bytes at a. On error the contents of p are undefined.
func (m *Memory) ReadAt(p []byte, a Addr) error {
	return m.access(a, uint64(len(p)), func(b []byte) { copy(p, b) })
}

// WriteAt copies p to the guest's bytes at a. On error some of them may have been written.
func (m *Memory) WriteAt(p []byte, a Addr) error {
	return m.access(a, uint64(len(p)), func(b []byte) { copy(b, p) })
}

// Zero clears n bytes at a.
func (m *Memory) Zero(a Addr, n uint64) error {
	return m.access(a, n, func(b []byte) { clear(b) })
}

// ReadUint16 reads a little-endian value of any alignment, not atomically.
func (m *Memory) ReadUint16(a Addr) (uint16, error) {
	var b [2]byte
	err := m.ReadAt(b[:], a)
	return binary.LittleEndian.Uint16(b[:]), err
}

// ReadUint32 reads a little-endian value of any alignment, not atomically.
func (m *Memory) ReadUint32(a Addr) (uint32, error) {
	var b [4]byte
	err := m.ReadAt(b[:], a)
	return binary.LittleEndian.Uint32(b[:]), err
}

// ReadUint64 reads a little-endian value of any alignment, not atomically.
func (m *Memory) ReadUint64(a Addr) (uint64, error) {
	var b [8]byte
	err := m.ReadAt(b[:], a)
	return binary.LittleEndian.Uint64(b[:]), err
}

// WriteUint16 writes a little-endian value of any alignment, not atomically.
func (m *Memory) WriteUint16(a Addr, v uint16) error {
	return m.WriteAt(binary.LittleEndian.AppendUint16(nil, v), a)
}

// WriteUint32 writes a little-endian value of any alignment, not atomically.
func (m *Memory) WriteUint32(a Addr, v uint32) error {
	return m.WriteAt(binary.LittleEndian.AppendUint32(nil, v), a)
}

// WriteUint64 writes a little-endian value of any alignment, not atomically.
func (m *Memory) WriteUint64(a Addr, v uint64) error {
	return m.WriteAt(binary.LittleEndian.AppendUint64(nil, v), a)
}

// LoadUint16 reads a little-endian value at an even address, as one load that nothing after it can be moved before.
func (m *Memory) LoadUint16(a Addr) (uint16, error) {
	if a%2 != 0 {
		return 0, &AccessError{Addr: a, Len: 2, Err: ErrMisaligned}
	}
	var v uint16
	err := m.access(a&^3, wordSize, func(b []byte) { v = loadHalf(b, int(a&2)) })
	return v, err
}

// StoreUint16 writes a little-endian value at an even address, as one store between full barriers. The bytes beside it are
// left to whoever else writes them.
func (m *Memory) StoreUint16(a Addr, v uint16) error {
	if a%2 != 0 {
		return &AccessError{Addr: a, Len: 2, Err: ErrMisaligned}
	}
	return m.access(a&^3, wordSize, func(b []byte) { storeHalf(b, int(a&2), v) })
}

func (m *Memory) access(a Addr, n uint64, f func(b []byte)) error {
	b, err := m.Slice(a, n)
	if err != nil {
		return err
	}
	if Guard(b, func() { f(b) }) {
		return nil
	}
	return &AccessError{Addr: a, Len: n, Err: ErrFault}
}
