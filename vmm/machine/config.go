package machine

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"

	"torpor/vmm/cow"
	"torpor/vmm/ratelimit"
	"torpor/vmm/x86"
)

// Config is a machine before it exists. Its files, its listener and what was prepared for it, and those of a Kernel or a Snapshot beside it, are the
// machine's from the call of Boot or Restore on: they are closed when it fails, at the latest by the machine's Close if not.
type Config struct {
	Host        *Host  // stays the caller's, and open until the machine is closed
	VCPUs       int    // 1-8
	MemoryBytes uint64 // 128 MiB-16 GiB, a multiple of 2 MiB
	Disks       []Disk // vda, vdb, ... in this order
	Vsock       *Vsock // nil: none
	Console     *Console
	CPUTemplate string   // what CPUs of a fleet have in common (x86.FindTemplate); "" is x86.TemplateHost
	Balloon     *Balloon // nil: none
	Net         []Net    // eth0, eth1, ... in this order

	Prepared *Prepared // what Host.Prepare made for as many vCPUs; nil, or for another number: that is made now
}

// Disk is a read-only base with copy-on-write layers over it (package cow).
type Disk struct {
	ID     string     // virtio-blk id, at most 20 bytes
	Base   *os.File   // raw image; nil for zeros
	Layers []*os.File // read-only, oldest first
	Top    *os.File   // open for reading and writing: takes the writes; nil makes the disk read-only
	Limit  ratelimit.Limit
}

func (d Disk) files() cow.Files { return cow.Files{Base: d.Base, Layers: d.Layers, Top: d.Top} }

// Vsock is the socket device.
type Vsock struct {
	CID      uint64            // of the guest, at least 3
	Listener *net.UnixListener // its clients come here (virtio.Vsock)
}

// Console is the serial port.
type Console struct {
	Log      *os.File // keeps the newest output (legacy.NewLog); nil keeps a tail in memory only
	MaxBytes uint64   // of the file; 0 for legacy.DefaultLogBytes
}

// Balloon is the device by which the guest gives memory back.
type Balloon struct {
	Reporting bool // the guest's kernel reports memory that it has free anyway
}

// Net is a network card.
type Net struct {
	ID  string   // names it in errors and in the log
	Tap *os.File // open tap (virtio.NewNet), the machine's from here on
	MAC [6]byte  // the guest's own address: unicast; a restored machine has that of the saved one

	LimitRX, LimitTX ratelimit.Limit // of what goes to the guest, and of what comes from it
}

// Kernel is what Boot starts.
type Kernel struct {
	Image   *os.File // ELF vmlinux
	Initrd  *os.File // nil: none
	Cmdline string
}

// close closes all that Boot and Restore were given. To close a file twice does no harm.
func (c Config) close() {
	for _, d := range c.Disks {
		_ = d.files().Close()
	}
	c.Prepared.Close()
	if c.Vsock != nil && c.Vsock.Listener != nil {
		_ = c.Vsock.Listener.Close()
	}
	for _, n := range c.Net {
		closeFiles(n.Tap)
	}
	if c.Console != nil {
		closeFiles(c.Console.Log)
	}
}

// closeFiles closes files nothing was written to.
func closeFiles(files ...*os.File) {
	for _, f := range files {
		if f != nil {
			_ = f.Close()
		}
	}
}

// ErrConfig is wrapped by every error about a Config.
var ErrConfig = errors.New("bad machine")

const (
	maxDiskID = 20
	minCID    = 3
	maxDisks  = 8
	maxNets   = 4
)

// validate reports all faults together.
func (c Config) validate() error {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: %s", ErrConfig, fmt.Sprintf(format, args...)))
	}
	if c.Host == nil {
		bad("no host")
	}
	if c.VCPUs < 1 || c.VCPUs > x86.MaxVCPUs {
		bad("%d vCPUs, want 1 to %d", c.VCPUs, x86.MaxVCPUs)
	}
	if c.MemoryBytes < x86.MinMemory || c.MemoryBytes > x86.MaxMemory || c.MemoryBytes%x86.MemoryAlign != 0 {
		bad("%d bytes of memory, want 128 MiB to 16 GiB in steps of 2 MiB", c.MemoryBytes)
	}
	if _, err := x86.FindTemplate(c.CPUTemplate); err != nil {
		bad("%v", err)
	}
	if len(c.Disks) > maxDisks {
		bad("%d disks, at most %d are possible", len(c.Disks), maxDisks)
	}
	for i, d := range c.Disks {
		if len(d.ID) > maxDiskID {
			bad("id of disk %d is longer than %d bytes", i, maxDiskID)
		}
		if d.Base == nil && d.Top == nil && len(d.Layers) == 0 || slices.Contains(d.Layers, nil) {
			bad("disk %d lacks files", i)
		}
		if err := d.Limit.Validate(); err != nil {
			bad("disk %d: %v", i, err)
		}
	}
	if c.Vsock != nil && (c.Vsock.CID < minCID || c.Vsock.CID >= 1<<32-1) {
		bad("vsock CID %d, want %d or more", c.Vsock.CID, minCID)
	}
	if c.Vsock != nil && c.Vsock.Listener == nil {
		bad("vsock without a socket")
	}
	if len(c.Net) > maxNets {
		bad("%d network cards, at most %d are possible", len(c.Net), maxNets)
	}
	for i, n := range c.Net {
		const group = 1 // bit of an address's first byte
		if n.Tap == nil {
			bad("network card %d (%s) has no tap", i, n.ID)
		}
		if n.MAC == [6]byte{} || n.MAC[0]&group != 0 {
			bad("network card %d (%s) has the address %x, which is not one card's", i, n.ID, n.MAC)
		}
		if err := errors.Join(n.LimitRX.Validate(), n.LimitTX.Validate()); err != nil {
			bad("network card %d (%s): %v", i, n.ID, err)
		}
	}
	return errors.Join(errs...)
}
