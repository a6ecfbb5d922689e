package kernel

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/pierrec/lz4/v4"
)

// ErrFormat is what every complaint about a kernel image's content wraps.
var ErrFormat = errors.New("not a kernel image that can be used")

// Offsets into the first sectors of a bzImage (Linux Documentation/arch/x86/boot.rst, "The Real-Mode Kernel Header").
const (
	offSetupSects    = 0x1f1 // u8; 0 means 4
	offBootFlag      = 0x1fe // u16
	offHeaderMagic   = 0x202 // u32
	offVersion       = 0x206 // u16, major in the high byte
	offXLoadFlags    = 0x236 // u16
	offPayloadOffset = 0x248 // u32, from the start of the protected-mode part
	offPayloadLength = 0x24c // u32
	headerEnd        = 0x268

	bootFlag    = 0xaa55
	headerMagic = 0x53726448 // "HdrS"
	minVersion  = 0x020c     // the first with xloadflags
	sectorSize  = 512

	xlfKernel64 = 1 << 0 // has the 64-bit entry point
)

// The LZ4 legacy frame (LZ4 Frame Format, "Legacy frame"): a magic word, then blocks of up to 8 MiB of plain data, each
// led by the u32 length of its compressed form. The kernel's build appends the u32 length of the plain whole.
const (
	lz4LegacyMagic = 0x184c2102
	lz4BlockPlain  = 8 << 20

	// maxPlain bounds what a header may make us allocate. A Debian cloud kernel takes 53 MB.
	maxPlain = 256 << 20
)

// ExtractVmlinux gives the ELF kernel inside a bzImage. The image must have a 64-bit entry and an LZ4 payload, as
// Debian's has. Errors wrap ErrFormat.
func ExtractVmlinux(bzImage []byte) ([]byte, error) {
	payload, err := findPayload(bzImage)
	if err != nil {
		return nil, err
	}
	vmlinux, err := inflate(payload)
	if err != nil {
		return nil, err
	}
	if err := CheckVmlinux(vmlinux); err != nil {
		return nil, err
	}
	return vmlinux, nil
}

// findPayload reads the setup header and gives the compressed kernel.
func findPayload(image []byte) ([]byte, error) {
	le := binary.LittleEndian
	switch {
	case len(image) < headerEnd:
		return nil, formatError("%d bytes are too few for a bzImage", len(image))
	case le.Uint16(image[offBootFlag:]) != bootFlag, le.Uint32(image[offHeaderMagic:]) != headerMagic:
		return nil, formatError("no bzImage header")
	case le.Uint16(image[offVersion:]) < minVersion:
		return nil, formatError("boot protocol %#x is older than %#x", le.Uint16(image[offVersion:]), minVersion)
	case le.Uint16(image[offXLoadFlags:])&xlfKernel64 == 0:
		return nil, formatError("no 64-bit entry point")
	}
	setupSects := uint64(image[offSetupSects])
	if setupSects == 0 {
		setupSects = 4
	}
	start := (setupSects+1)*sectorSize + uint64(le.Uint32(image[offPayloadOffset:]))
	end := start + uint64(le.Uint32(image[offPayloadLength:]))
	if end > uint64(len(image)) {
		return nil, formatError("the payload ends at %d of %d bytes: the file is cut short", end, len(image))
	}
	return image[start:end], nil
}

// inflate undoes the LZ4 legacy frame that makes up a kernel's payload.
func inflate(payload []byte) ([]byte, error) {
	le := binary.LittleEndian
	if len(payload) < 8 {
		return nil, formatError("a payload of %d bytes", len(payload))
	}
	if magic := le.Uint32(payload); magic != lz4LegacyMagic {
		return nil, formatError("the payload begins with %#08x, not with LZ4's legacy magic", magic)
	}
	blocks, trailer := payload[4:len(payload)-4], payload[len(payload)-4:]
	size := le.Uint32(trailer)
	if size > maxPlain {
		return nil, formatError("it says to inflate to %d bytes, more than %d", size, maxPlain)
	}
	plain := make([]byte, size)
	done := 0
	for len(blocks) > 0 {
		block, rest, err := nextBlock(blocks)
		if err != nil {
			return nil, err
		}
		n, err := lz4.UncompressBlock(block, plain[done:min(done+lz4BlockPlain, len(plain))])
		if err != nil {
			return nil, formatError("LZ4 block at plain offset %d: %v", done, err)
		}
		done, blocks = done+n, rest
	}
	if done != len(plain) {
		return nil, formatError("it inflates to %d bytes, its trailer says %d", done, len(plain))
	}
	return plain, nil
}

func nextBlock(b []byte) (block, rest []byte, err error) {
	if len(b) < 4 {
		return nil, nil, formatError("%d bytes after the last LZ4 block", len(b))
	}
	n := binary.LittleEndian.Uint32(b)
	if n == 0 || uint64(n) > uint64(len(b)-4) {
		return nil, nil, formatError("an LZ4 block of %d bytes where %d are left", n, len(b)-4)
	}
	return b[4 : 4+n], b[4+n:], nil
}

// CheckVmlinux tells whether b is a kernel that can be loaded at fixed physical addresses and entered in 64-bit mode.
func CheckVmlinux(b []byte) error {
	f, err := elf.NewFile(bytes.NewReader(b))
	if err != nil {
		return formatError("not an ELF file: %v", err)
	}
	defer f.Close()
	if f.Class != elf.ELFCLASS64 || f.Machine != elf.EM_X86_64 || f.Type != elf.ET_EXEC {
		return formatError("an ELF file of %v, %v, %v", f.Class, f.Machine, f.Type)
	}
	for _, p := range f.Progs {
		if p.Type != elf.PT_LOAD {
			continue
		}
		if p.Filesz > p.Memsz || p.Off+p.Filesz < p.Off || p.Off+p.Filesz > uint64(len(b)) {
			return formatError("a segment of %d bytes at offset %d of %d", p.Filesz, p.Off, len(b))
		}
		if f.Entry >= p.Paddr && f.Entry-p.Paddr < p.Filesz {
			return nil
		}
	}
	return formatError("the entry point %#x is in no loaded segment", f.Entry)
}

func formatError(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrFormat, fmt.Sprintf(format, args...))
}
