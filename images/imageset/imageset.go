// Package imageset is the format of a guest image set: a directory with the kernel, the initramfs, the read-only root file
// system and image.json, which names them and fixes their digests. A set never changes once it is made.
package imageset

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// ManifestName is the file that describes a set.
const ManifestName = "image.json"

// ErrDamaged is wrapped by every error that says a set's content is not what its manifest says.
var ErrDamaged = errors.New("the image set is damaged")

// Manifest is the content of image.json. File names are relative to the set's directory.
type Manifest struct {
	Name        string `json:"name"`
	Digest      string `json:"digest"`      // "sha256:<hex>" over everything else in the manifest, so over all parts
	Kernel      string `json:"kernel"`      // version of the kernel's package
	Cmdline     string `json:"cmdline"`     // kernel command line; the VMM may add to it
	EnvdVersion string `json:"envdVersion"` // the envd API version told to clients
	DiskBytes   int64  `json:"diskBytes"`   // virtual size of the root disk
	Vmlinux     string `json:"vmlinux"`
	Initrd      string `json:"initrd"`
	RootFS      string `json:"rootfs"`

	// Parts holds the digest of each file, and of "envd", which is inside the initramfs.
	Parts map[string]string `json:"parts"`
}

// Seal sets the digest.
func (m *Manifest) Seal() error {
	digest, err := m.computeDigest()
	m.Digest = digest
	return err
}

// computeDigest hashes the manifest's JSON with an empty digest: fields in order, map keys sorted, so always the same bytes.
func (m Manifest) computeDigest() (string, error) {
	m.Digest = ""
	b, err := json.Marshal(m)
	if err != nil {
		return "", fmt.Errorf("encode %s: %w", ManifestName, err)
	}
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:]), nil
}

// ShortDigest is the first 12 hex digits, for names.
func (m Manifest) ShortDigest() string {
	return strings.TrimPrefix(m.Digest, "sha256:")[:12]
}

// Write puts the manifest into a set's directory.
func (m Manifest) Write(dir string) error {
	b, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return fmt.Errorf("encode %s: %w", ManifestName, err)
	}
	return os.WriteFile(filepath.Join(dir, ManifestName), append(b, '\n'), 0o444)
}

// Read reads and checks the manifest of a set. It does not read the parts: see Verify.
func Read(dir string) (Manifest, error) {
	b, err := os.ReadFile(filepath.Join(dir, ManifestName))
	if err != nil {
		return Manifest{}, fmt.Errorf("read the image set: %w", err)
	}
	return Parse(b)
}

// Parse decodes image.json and checks that its digest fits. Errors wrap ErrDamaged.
func Parse(b []byte) (Manifest, error) {
	var m Manifest
	if err := json.Unmarshal(b, &m); err != nil {
		return Manifest{}, fmt.Errorf("%w: %s: %w", ErrDamaged, ManifestName, err)
	}
	want, err := m.computeDigest()
	if err != nil {
		return Manifest{}, err
	}
	if m.Digest != want {
		return Manifest{}, fmt.Errorf("%w: %s says digest %q, its content has %s", ErrDamaged, ManifestName, m.Digest, want)
	}
	for _, name := range m.Files() {
		if name == "" || name != filepath.Base(name) || name == ".." || name == "." {
			return Manifest{}, fmt.Errorf("%w: %q is no file name", ErrDamaged, name)
		}
		if m.Parts[name] == "" {
			return Manifest{}, fmt.Errorf("%w: no digest for %s", ErrDamaged, name)
		}
	}
	return m, nil
}

// Files are the names of the set's files beside the manifest.
func (m Manifest) Files() []string { return []string{m.Vmlinux, m.Initrd, m.RootFS} }

// Verify reads all parts of the set and compares their digests. Errors wrap ErrDamaged and name the part.
func Verify(dir string) (Manifest, error) {
	m, err := Read(dir)
	if err != nil {
		return Manifest{}, err
	}
	for _, name := range m.Files() {
		got, err := HashFile(filepath.Join(dir, name))
		if err != nil {
			return m, err
		}
		if got != m.Parts[name] {
			return m, fmt.Errorf("%w: %s is %s, not %s", ErrDamaged, name, got, m.Parts[name])
		}
	}
	info, err := os.Stat(filepath.Join(dir, m.RootFS))
	if err != nil {
		return m, err
	}
	if info.Size() != m.DiskBytes {
		return m, fmt.Errorf("%w: %s has %d bytes, not %d", ErrDamaged, m.RootFS, info.Size(), m.DiskBytes)
	}
	return m, nil
}

// HashFile is the digest of a file's content.
func HashFile(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("hash: %w", err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", fmt.Errorf("hash %s: %w", path, err)
	}
	return "sha256:" + hex.EncodeToString(h.Sum(nil)), nil
}
