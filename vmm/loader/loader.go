// Package loader puts a kernel, an initrd and a command line into guest memory.
//
// A kernel file is input from outside: every offset and length in it is checked before it is used, and an error names what is
// wrong. ELF is read by hand, program headers only, because that is all a loader needs (the format: System V ABI, "ELF-64
// Object File Format", and the kernel's linux/elf.h).
package loader

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"

	"torpor/vmm/guestmem"
)

// ErrKernel is wrapped by every error about the contents of a kernel file.
var ErrKernel = errors.New("not a bootable kernel")

// Offsets and values of the ELF-64 header and program header.
const (
	elfHeaderBytes = 64
	elfMagic       = "\x7fELF\x02\x01\x01" // 64 bits, little-endian, version 1
	elfType        = 16                    // u16
	elfMachine     = 18                    // u16
	elfEntry       = 24                    // u64
	elfPhOff       = 32                    // u64
	elfPhEntSize   = 54                    // u16
	elfPhNum       = 56                    // u16

	etExec   = 2
	emX86_64 = 62

	progHeaderBytes = 56
	phType          = 0  // u32
	phOffset        = 8  // u64
	phPhysAddr      = 24 // u64
	phFileSize      = 32 // u64
	phMemSize       = 40 // u64
	ptLoad          = 1

	// maxProgHeaders is far above what a kernel has (about five) and bounds the work.
	maxProgHeaders = 64
)

// Kernel is where a loaded kernel lies, in guest-physical addresses.
type Kernel struct {
	Entry      uint64
	Start, End uint64 // first byte, and the one after the last, bss included
}

type segment struct{ off, addr, fileSize, memSize uint64 }

// ELF loads the PT_LOAD segments of a vmlinux at their physical addresses. Memory must be zero where bss is to be. Nothing is
// loaded unless every segment lies in memory and at or above floor.
func ELF(f io.ReaderAt, mem *guestmem.Memory, floor uint64) (Kernel, error) {
	entry, segments, err := parse(f)
	if err != nil {
		return Kernel{}, err
	}
	k := Kernel{Entry: entry, Start: ^uint64(0)}
	for _, s := range segments {
		if s.addr < floor || !mem.Contains(guestmem.Addr(s.addr), s.memSize) {
			return Kernel{}, fmt.Errorf("%w: segment at %#x of %d bytes does not fit into the guest's memory", ErrKernel, s.addr, s.memSize)
		}
		k.Start, k.End = min(k.Start, s.addr), max(k.End, s.addr+s.memSize)
	}
	if entry < k.Start || entry >= k.End {
		return Kernel{}, fmt.Errorf("%w: entry point %#x is in no segment", ErrKernel, entry)
	}
	for _, s := range segments {
		if err := load(f, mem, s); err != nil {
			return Kernel{}, err
		}
	}
	return k, nil
}

func load(f io.ReaderAt, mem *guestmem.Memory, s segment) error {
	b, err := mem.Slice(guestmem.Addr(s.addr), s.fileSize)
	if err != nil {
		return err
	}
	if n, err := f.ReadAt(b, int64(s.off)); n < len(b) {
		if errors.Is(err, io.EOF) {
			return fmt.Errorf("%w: segment at %#x ends after the file", ErrKernel, s.addr)
		}
		return fmt.Errorf("load kernel segment at %#x: %w", s.addr, err)
	}
	return nil
}

// parse reads the headers and returns the entry point and the loadable segments.
func parse(f io.ReaderAt) (entry uint64, segments []segment, err error) {
	var h [elfHeaderBytes]byte
	if err := readHeader(f, h[:], 0); err != nil {
		return 0, nil, err
	}
	le := binary.LittleEndian
	switch {
	case string(h[:len(elfMagic)]) != elfMagic:
		return 0, nil, fmt.Errorf("%w: no ELF-64 header (a bzImage must be extracted to its vmlinux)", ErrKernel)
	case le.Uint16(h[elfType:]) != etExec || le.Uint16(h[elfMachine:]) != emX86_64:
		return 0, nil, fmt.Errorf("%w: ELF type %d, machine %d; want an x86-64 executable", ErrKernel, le.Uint16(h[elfType:]), le.Uint16(h[elfMachine:]))
	case le.Uint16(h[elfPhEntSize:]) != progHeaderBytes || le.Uint16(h[elfPhNum:]) > maxProgHeaders:
		return 0, nil, fmt.Errorf("%w: %d program headers of %d bytes", ErrKernel, le.Uint16(h[elfPhNum:]), le.Uint16(h[elfPhEntSize:]))
	}
	table := make([]byte, progHeaderBytes*int(le.Uint16(h[elfPhNum:])))
	if err := readHeader(f, table, le.Uint64(h[elfPhOff:])); err != nil {
		return 0, nil, err
	}
	for p := table; len(p) > 0; p = p[progHeaderBytes:] {
		if le.Uint32(p[phType:]) != ptLoad || le.Uint64(p[phMemSize:]) == 0 {
			continue
		}
		s := segment{le.Uint64(p[phOffset:]), le.Uint64(p[phPhysAddr:]), le.Uint64(p[phFileSize:]), le.Uint64(p[phMemSize:])}
		if s.fileSize > s.memSize || s.off > maxFileOffset || s.addr+s.memSize < s.addr {
			return 0, nil, fmt.Errorf("%w: segment at %#x has impossible sizes", ErrKernel, s.addr)
		}
		segments = append(segments, s)
	}
	if len(segments) == 0 {
		return 0, nil, fmt.Errorf("%w: no loadable segment", ErrKernel)
	}
	return le.Uint64(h[elfEntry:]), segments, nil
}

// maxFileOffset keeps offsets positive as int64.
const maxFileOffset = 1 << 62

func readHeader(f io.ReaderAt, b []byte, off uint64) error {
	if off > maxFileOffset {
		return fmt.Errorf("%w: header at %#x", ErrKernel, off)
	}
	if n, err := f.ReadAt(b, int64(off)); n < len(b) {
		if errors.Is(err, io.EOF) {
			return fmt.Errorf("%w: the file is too short", ErrKernel)
		}
		return fmt.Errorf("read kernel header: %w", err)
	}
	return nil
}

// Initrd copies size bytes of f as high as they go below limit, page-aligned, and returns where. They must not reach down to
// floor, the end of the kernel.
func Initrd(f io.ReaderAt, size int64, mem *guestmem.Memory, floor, limit uint64) (addr uint64, err error) {
	if size <= 0 {
		return 0, errors.New("load initrd: the file is empty")
	}
	if uint64(size) > limit || (limit-uint64(size))&^(guestmem.PageSize-1) < floor {
		return 0, fmt.Errorf("load initrd: %d bytes do not fit between the kernel at %#x and %#x; give the machine more memory", size, floor, limit)
	}
	addr = (limit - uint64(size)) &^ (guestmem.PageSize - 1)
	b, err := mem.Slice(guestmem.Addr(addr), uint64(size))
	if err != nil {
		return 0, fmt.Errorf("load initrd: %w", err)
	}
	if n, err := f.ReadAt(b, 0); n < len(b) {
		return 0, fmt.Errorf("load initrd: %w", err)
	}
	return addr, nil
}

// Cmdline writes the NUL-terminated kernel command line to addr. limit is its longest length without the NUL.
func Cmdline(line string, mem *guestmem.Memory, addr uint64, limit int) error {
	if len(line) > limit {
		return fmt.Errorf("kernel command line is %d bytes, at most %d are possible", len(line), limit)
	}
	if strings.ContainsAny(line, "\x00\n") {
		return errors.New("kernel command line has a NUL or a line break")
	}
	return mem.WriteAt(append([]byte(line), 0), guestmem.Addr(addr))
}
