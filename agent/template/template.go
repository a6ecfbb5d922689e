// Package template keeps what sandboxes start from: machines that were booted once, warmed up, and saved. A template is named
// by a digest of everything that makes it (image set, VMM, shape), is built when there is none of that digest, and never
// changes. Sandboxes share its memory and its disk, and need it for as long as they live.
package template

import (
	"torpor/agent/snapcache"
	"torpor/api/vmmpb"
)

// The files of a template's snapshot.
const (
	StateFile  = "vmstate"
	MemoryFile = "mem"
	layerFile  = "disk.layer"
)

// Template is one that is ready. It does not change.
type Template struct {
	ID          string
	Digest      string // "sha256:<hex>.<hex>": of the recipe, and the number of the build; without that if an older version built it
	Snapshot    *snapcache.Snapshot
	RootFS      string // read-only base of the disk
	Kernel      string // what is booted when a sandbox is to begin without its memory
	Initrd      string
	Cmdline     string
	VCPUs       uint32
	MemoryBytes uint64
	DiskBytes   uint64
	EnvdVersion string
}

// Layer returns the path of the disk layer with what the boot and the warm-up wrote. It lies directly on RootFS.
func (t *Template) Layer() string { return t.Snapshot.Path(layerFile) }

// Machine describes a machine of the template's shape to a VMM. layers lie on RootFS, oldest first; top takes the writes.
func (t *Template) Machine(layers []string, top string, vsock *vmmpb.Vsock, console *vmmpb.Console) *vmmpb.Machine {
	return &vmmpb.Machine{
		Vcpus: t.VCPUs, MemoryBytes: t.MemoryBytes,
		Disks: []*vmmpb.Disk{{Id: "root", Base: t.RootFS, Layers: layers, Top: top}},
		Vsock: vsock, Console: console,
		// What a sandbox has freed is neither kept in memory nor stored at its next pause.
		Balloon: &vmmpb.Balloon{Reporting: true},
	}
}
