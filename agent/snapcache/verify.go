package snapcache

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"time"

	"torpor/agent/durable"
)

// Untouched is the time of modification that a published file is given. Whatever writes to it afterwards changes that, and so a
// look at a file's times tells whether it must be read again to be trusted. It does not tell of a disk that forgets: Verify does.
var Untouched = time.Unix(1_000_000_000, 0)

// Verify reads the named files, or all without a name, and compares their sums.
func (s *Snapshot) Verify(names ...string) error {
	return s.each(names, func(f File) error { return s.verifyFile(f) })
}

// Check is Verify of those of the named files that somebody wrote to since they were published.
func (s *Snapshot) Check(names ...string) error {
	return s.each(names, func(f File) error {
		info, err := os.Stat(s.Path(f.Name))
		if err != nil {
			return &PartError{s.Dir, f.Name, err.Error()}
		}
		if info.ModTime().Equal(Untouched) && info.Size() == f.Size {
			return nil
		}
		if err := s.verifyFile(f); err != nil {
			return err
		}
		return durable.OS{}.Stamp(s.Path(f.Name), Untouched)
	})
}

func (s *Snapshot) each(names []string, do func(File) error) error {
	wanted := map[string]bool{}
	for _, n := range names {
		wanted[n] = true
	}
	for _, f := range s.Manifest.Files {
		if len(names) > 0 && !wanted[f.Name] {
			continue
		}
		if err := do(f); err != nil {
			return err
		}
	}
	return nil
}

func (s *Snapshot) verifyFile(want File) error {
	f, err := os.Open(s.Path(want.Name))
	if err != nil {
		return &PartError{s.Dir, want.Name, err.Error()}
	}
	defer f.Close()
	got, err := want.of(f)
	if err != nil {
		return &PartError{s.Dir, want.Name, "it cannot be read: " + err.Error()}
	}
	if got != want.Sum {
		return &PartError{s.Dir, want.Name, fmt.Sprintf("its checksum is %v, the manifest says %v", got, want.Sum)}
	}
	return nil
}

// of works out the same kind of sum of a file. A memory layer, which holds checksums itself, is compared with those as well.
func (s Sum) of(f *os.File) (Sum, error) {
	switch {
	case s.SHA256 != "":
		h := sha256.New()
		_, err := io.Copy(h, f)
		return Sum{SHA256: hex.EncodeToString(h.Sum(nil))}, err
	case s.Layer != "":
		return layerSum(f)
	case s.Flat != "":
		return flatSum(f)
	default:
		sum, err := checksum(f)
		return Sum{CRC32C: sum}, err
	}
}

func (s Sum) String() string { return s.CRC32C + s.SHA256 + s.Layer + s.Flat }
