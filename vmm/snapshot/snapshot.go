// Package snapshot reads and writes the files of a saved machine. FORMAT.md is the byte-level contract.
//
// A saved machine is a state (vCPUs, interrupt controllers, devices, what the CPU must be able to do) and a memory: a flat image
// in the order of guest-physical addresses without the hole below 4 GiB (full), or such an image, the base, with layers over it,
// each of the pages that differ from what is below (diff). Every byte of every file is under a checksum, and each layer names what
// it lies upon by digest. Merge makes one layer of several.
//
// The package knows nothing of KVM: register blocks and device states are opaque bytes here. It is a leaf.
package snapshot

import (
	"errors"
	"fmt"
	"hash/crc32"
)

// PageSize is the unit of guest memory, in bytes.
const PageSize = 4096

// ChunkBytes is how much memory one checksum covers, at most.
const ChunkBytes = 1 << 20

const chunkPages = ChunkBytes / PageSize

// What can be wrong with a file. An *Error unwraps to one of them.
var (
	ErrFormat   = errors.New("malformed")
	ErrChecksum = errors.New("checksum does not match")
	ErrVersion  = errors.New("unsupported format version")
	ErrMismatch = errors.New("does not belong to this snapshot")
)

// Error says which part of a snapshot is bad and why.
type Error struct {
	Part string // such as "state, section vcpu 1" or "memory layer 2, pages 4096-4351"
	Err  error
}

func (e *Error) Error() string { return fmt.Sprintf("snapshot: %s: %v", e.Part, e.Err) }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

func bad(part string, err error) error { return &Error{Part: part, Err: err} }

func badf(part, format string, args ...any) error {
	return bad(part, fmt.Errorf("%w: %s", ErrFormat, fmt.Sprintf(format, args...)))
}

// ID names one snapshot; its state and its newest memory layer carry the same one.
type ID [16]byte

func (id ID) String() string { return fmt.Sprintf("%x", id[:]) }

// castagnoli is CRC-32C, which current CPUs compute in hardware.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Checksum returns the CRC-32C of b.
func Checksum(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }
