package snapcache

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Version is the manifest version this program writes. It reads this and older ones: in version 1 a generation had one memory
// layer, mem.diff, and every file the checksum CRC32C.
const Version = 2

// The errors of reading a snapshot. Every one is wrapped with the directory and the part concerned.
var (
	ErrNotExist = errors.New("there is no such snapshot")
	ErrCorrupt  = errors.New("the snapshot is damaged")
	ErrVersion  = errors.New("the snapshot was written by a newer version")
	ErrExists   = errors.New("the snapshot exists already")
)

// PartError names the damaged part of a snapshot. It is ErrCorrupt.
type PartError struct {
	Dir, Part string
	Reason    string
}

func (e *PartError) Error() string {
	return fmt.Sprintf("snapshot %s: %s: %s", filepath.Base(e.Dir), e.Part, e.Reason)
}

// Is makes every PartError an ErrCorrupt.
func (e *PartError) Is(target error) bool { return target == ErrCorrupt }

// Manifest says what a snapshot is made of and what it can be restored on.
type Manifest struct {
	Version     int       `json:"version"`
	Kind        string    `json:"kind"`               // template | generation | kept (by request) | fork (for the children of one)
	Owner       string    `json:"owner"`              // template id, or sandbox id
	Template    string    `json:"template,omitempty"` // kept, fork: what the sandbox is said to be made from
	Generation  uint64    `json:"generation"`         // 0 for a template
	Incarnation uint64    `json:"incarnation"`        // in which it was taken
	Parent      string    `json:"parent"`             // digest of the template whose memory and disk it builds on; of itself for a template
	Image       string    `json:"image"`              // digest of the image set below everything
	Layers      []string  `json:"layers"`             // own disk layers, oldest first
	Base        string    `json:"base,omitempty"`     // file: a flat memory of its own below the layers; empty: the template's
	Memory      []string  `json:"memory"`             // files: memory layers over the base, oldest first
	Merged      uint64    `json:"merged,omitempty"`   // the generation whose layers were merged to make this one; it is of the same instant
	VCPUs       uint32    `json:"vcpus"`              //
	MemoryBytes uint64    `json:"memoryBytes"`        //
	DiskBytes   uint64    `json:"diskBytes"`          // virtual size
	EnvdVersion string    `json:"envdVersion"`        //
	CreatedAt   time.Time `json:"createdAt"`          //
	Files       []File    `json:"files"`              // filled by Publish
}

// File is one file of a snapshot. Exactly one of its sums is set.
type File struct {
	Name string `json:"name"`
	Size int64  `json:"size"`
	Sum
}

// Sum is what a file must be. Whoever wrote a file may know it, so that it need not be read again to be published.
type Sum struct {
	CRC32C string `json:"crc32c,omitempty"` // see checksum
	SHA256 string `json:"sha256,omitempty"` // of the whole file
	Layer  string `json:"layer,omitempty"`  // digest of a memory layer (vmm/snapshot): of header and table, which has a checksum of every run
	Flat   string `json:"flat,omitempty"`   // digest of a flat memory (vmm/snapshot): of the checksums of its chunks
}

// known reports whether there is exactly one sum.
func (s Sum) known() bool {
	n := 0
	for _, sum := range []string{s.CRC32C, s.SHA256, s.Layer, s.Flat} {
		if sum != "" {
			n++
		}
	}
	return n == 1
}

// oldMemory is the one memory layer of a generation of version 1.
const oldMemory = "mem.diff"

// manifestName is the file whose presence makes a directory a snapshot.
const manifestName = "manifest.json"

// maxManifest bounds what is read of a manifest.
const maxManifest = 1 << 20

// envelope carries the manifest with a digest of its exact bytes.
type envelope struct {
	Manifest json.RawMessage `json:"manifest"`
	SHA256   string          `json:"sha256"`
}

func encodeManifest(m Manifest) ([]byte, error) {
	body, err := json.Marshal(m)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(body)
	return json.Marshal(envelope{Manifest: body, SHA256: hex.EncodeToString(sum[:])})
}

// decodeManifest checks everything that can be checked without the files.
func decodeManifest(raw []byte) (Manifest, error) {
	var env envelope
	if err := json.Unmarshal(raw, &env); err != nil {
		return Manifest{}, err
	}
	if sum := sha256.Sum256(env.Manifest); hex.EncodeToString(sum[:]) != env.SHA256 {
		return Manifest{}, errors.New("its digest does not match")
	}
	var m Manifest
	if err := json.Unmarshal(env.Manifest, &m); err != nil {
		return Manifest{}, err
	}
	if m.Version > Version {
		return Manifest{}, fmt.Errorf("manifest version %d, this program knows up to %d: %w", m.Version, Version, ErrVersion)
	}
	for _, f := range m.Files {
		if !plain(f.Name) || f.Size < 0 || !f.known() {
			return Manifest{}, fmt.Errorf("bad file entry %q", f.Name)
		}
	}
	for _, l := range m.Layers {
		if !plain(l) {
			return Manifest{}, fmt.Errorf("bad layer name %q", l)
		}
	}
	if m.Version < 2 && m.has(oldMemory) {
		m.Memory = []string{oldMemory}
	}
	return m, m.complete()
}

// complete checks that the memory named is among the files.
func (m *Manifest) complete() error {
	for _, name := range m.MemoryFiles() {
		if !m.has(name) {
			return fmt.Errorf("memory %q is none of the files", name)
		}
	}
	return nil
}

func (m *Manifest) has(name string) bool {
	return slices.ContainsFunc(m.Files, func(f File) bool { return f.Name == name })
}

// MemoryFiles lists what the memory is made of, from below.
func (m *Manifest) MemoryFiles() []string {
	if m.Base == "" {
		return slices.Clone(m.Memory)
	}
	return append([]string{m.Base}, m.Memory...)
}

// plain reports whether name is a file name without any path in it.
func plain(name string) bool {
	return name != "" && name != "." && name != ".." && !strings.ContainsAny(name, "/\x00")
}

func readManifest(dir string) (Manifest, error) {
	f, err := os.Open(filepath.Join(dir, manifestName))
	if errors.Is(err, fs.ErrNotExist) {
		return Manifest{}, fmt.Errorf("snapshot %s: %s is missing: %w", filepath.Base(dir), manifestName, ErrNotExist)
	}
	if err != nil {
		return Manifest{}, fmt.Errorf("snapshot %s: %w", filepath.Base(dir), err)
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, maxManifest+1))
	if err != nil {
		return Manifest{}, fmt.Errorf("snapshot %s: read the manifest: %w", filepath.Base(dir), err)
	}
	if len(raw) > maxManifest {
		return Manifest{}, &PartError{dir, manifestName, "it is too long"}
	}
	m, err := decodeManifest(raw)
	switch {
	case errors.Is(err, ErrVersion):
		return Manifest{}, fmt.Errorf("snapshot %s: %w", filepath.Base(dir), err)
	case err != nil:
		return Manifest{}, &PartError{dir, manifestName, err.Error()}
	}
	return m, nil
}
