package x86

import "encoding/binary"

// PageSize is the size of the small page and of the zero page.
const PageSize = 4096

// Offsets in struct boot_params (zero-page.rst) and in struct setup_header inside it (boot.rst, "The Real-Mode Kernel Header").
const (
	zpACPIRSDP     = 0x070
	zpE820Entries  = 0x1e8
	zpBootFlag     = 0x1fe
	zpHeaderMagic  = 0x202
	zpVersion      = 0x206
	zpLoader       = 0x210
	zpLoadFlags    = 0x211
	zpRamdiskImage = 0x218
	zpRamdiskSize  = 0x21c
	zpCmdline      = 0x228
	zpInitrdMax    = 0x22c
	zpCmdlineSize  = 0x238
	zpSetupData    = 0x250
	zpE820Table    = 0x2d0

	bootFlag        = 0xaa55
	headerMagic     = 0x53726448 // "HdrS"
	protocolVersion = 0x020f
	loaderUndefined = 0xff
	loadedHigh      = 1

	e820Bytes    = 20
	e820RAM      = 1
	e820Reserved = 2

	setupRNGSeed     = 9 // SETUP_RNG_SEED: the kernel credits it and wipes it
	setupHeaderBytes = 16
)

// RNGSeedBytes is the length of the seed given to the guest's kernel at cold boot.
const RNGSeedBytes = 64

// InitrdMax is the highest address an initrd may reach: initrd_addr_max of the boot protocol for current kernels.
const InitrdMax = 0x7fffffff

// BootParams is what the zero page tells the kernel.
type BootParams struct {
	// The command line is not in it: it lies at CmdlineAddr, NUL-terminated.
	Memory    uint64 // bytes of RAM
	Initrd    Range  // zero Size: none
	RSDP      uint64
	SetupData uint64 // first setup_data node; 0: none
}

// ZeroPage returns the 4096 bytes for ZeroPageAddr.
func ZeroPage(b BootParams) []byte {
	p := make([]byte, PageSize)
	le := binary.LittleEndian
	le.PutUint64(p[zpACPIRSDP:], b.RSDP)
	le.PutUint16(p[zpBootFlag:], bootFlag)
	le.PutUint32(p[zpHeaderMagic:], headerMagic)
	le.PutUint16(p[zpVersion:], protocolVersion)
	p[zpLoader] = loaderUndefined
	p[zpLoadFlags] = loadedHigh
	le.PutUint32(p[zpRamdiskImage:], uint32(b.Initrd.Addr))
	le.PutUint32(p[zpRamdiskSize:], uint32(b.Initrd.Size))
	le.PutUint32(p[zpCmdline:], CmdlineAddr)
	le.PutUint32(p[zpInitrdMax:], InitrdMax)
	le.PutUint32(p[zpCmdlineSize:], MaxCmdline)
	le.PutUint64(p[zpSetupData:], b.SetupData)

	n := 0
	e820 := func(addr, end uint64, kind uint32) {
		e := p[zpE820Table+n*e820Bytes:]
		le.PutUint64(e, addr)
		le.PutUint64(e[8:], end-addr)
		le.PutUint32(e[16:], kind)
		n++
	}
	e820(0, LowRAMEnd, e820RAM)
	e820(LowRAMEnd, HighRAMAddr, e820Reserved)
	for _, r := range RAM(b.Memory) {
		e820(max(r.Addr, HighRAMAddr), r.Addr+r.Size, e820RAM)
	}
	p[zpE820Entries] = uint8(n)
	return p
}

// RNGSeed returns a setup_data node, the last of its list, that carries a seed for the kernel's random number generator.
func RNGSeed(seed []byte) []byte {
	node := make([]byte, setupHeaderBytes, setupHeaderBytes+len(seed)) // u64 next, u32 type, u32 length
	binary.LittleEndian.PutUint32(node[8:], setupRNGSeed)
	binary.LittleEndian.PutUint32(node[12:], uint32(len(seed)))
	return append(node, seed...)
}
