package snapcache

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"
)

const tmpSuffix = ".tmp"

// Draft is a snapshot in the making.
type Draft struct {
	final  string
	tmp    string
	known  map[string]File // linked files, by name
	layers map[string]bool // linked disk layers, by name
	// cut is called after each step of Publish with the step's name; an error is what a crash there would be. Tests set it.
	cut func(step string) error
}

// Begin makes an empty draft of the snapshot dir. A draft of the same name that was left behind is removed.
func Begin(dir string) (*Draft, error) {
	d := &Draft{
		final: dir, tmp: dir + tmpSuffix, known: map[string]File{}, layers: map[string]bool{},
		cut: func(string) error { return nil },
	}
	switch _, err := readManifest(dir); {
	case err == nil || errors.Is(err, ErrVersion):
		return nil, fmt.Errorf("begin snapshot %s: %w", filepath.Base(dir), ErrExists)
	case !errors.Is(err, ErrNotExist) && !errors.Is(err, ErrCorrupt):
		return nil, err
	}
	if err := errors.Join(os.RemoveAll(d.final), os.RemoveAll(d.tmp), os.MkdirAll(d.tmp, 0o700)); err != nil {
		return nil, fmt.Errorf("begin snapshot %s: %w", filepath.Base(dir), err)
	}
	return d, nil
}

// Path returns where the file called name is to be written.
func (d *Draft) Path(name string) string { return filepath.Join(d.tmp, name) }

// Discard removes the draft. After a Publish that succeeded it removes nothing.
func (d *Draft) Discard() error { return os.RemoveAll(d.tmp) }

// Publish makes the draft's files durable, writes the manifest with their sizes and checksums, and moves the snapshot to its
// place. When it returns an error nothing has been published.
func (d *Draft) Publish(m Manifest) (*Snapshot, error) {
	s, err := d.publish(m)
	if err != nil {
		return nil, fmt.Errorf("publish snapshot %s: %w", filepath.Base(d.final), err)
	}
	return s, nil
}

func (d *Draft) publish(m Manifest) (*Snapshot, error) {
	files, err := d.seal()
	if err != nil {
		return nil, err
	}
	m.Version, m.Files = Version, files
	raw, err := encodeManifest(m)
	if err != nil {
		return nil, err
	}
	steps := []struct {
		name string
		do   func() error
	}{
		{"manifest", func() error { return writeSynced(d.Path(manifestName), raw) }},
		{"sync draft", func() error { return syncDir(d.tmp) }},
		{"rename", func() error { return os.Rename(d.tmp, d.final) }},
		{"sync parent", func() error { return syncDir(filepath.Dir(d.final)) }},
	}
	for _, s := range steps {
		if err := s.do(); err != nil {
			return nil, errors.Join(fmt.Errorf("%s: %w", s.name, err), d.takeBack())
		}
		if err := d.cut(s.name); err != nil {
			return nil, err
		}
	}
	return &Snapshot{Dir: d.final, Manifest: m}, nil
}

// takeBack undoes a rename that could not be made durable: an error must mean that nothing was published.
func (d *Draft) takeBack() error {
	if _, err := os.Stat(d.tmp); err == nil {
		return nil
	}
	return Remove(d.final)
}

// seal syncs the draft's files and describes them.
func (d *Draft) seal() ([]File, error) {
	entries, err := os.ReadDir(d.tmp)
	if err != nil {
		return nil, err
	}
	var files []File
	for _, e := range entries {
		if d.layers[e.Name()] {
			continue
		}
		file, ok := d.known[e.Name()]
		if !ok {
			if file, err = sealFile(filepath.Join(d.tmp, e.Name())); err != nil {
				return nil, fmt.Errorf("seal %s: %w", e.Name(), err)
			}
		}
		files = append(files, file)
		if err := d.cut("seal " + e.Name()); err != nil {
			return nil, err
		}
	}
	sort.Slice(files, func(i, j int) bool { return files[i].Name < files[j].Name })
	return files, nil
}

func sealFile(path string) (File, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return File{}, err
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return File{}, err
	}
	info, err := f.Stat()
	if err != nil {
		return File{}, err
	}
	sum, err := checksum(f)
	if err != nil {
		return File{}, err
	}
	return File{Name: filepath.Base(path), Size: info.Size(), CRC32C: sum}, nil
}

func writeSynced(path string, data []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, werr := f.Write(data)
	return errors.Join(werr, f.Sync(), f.Close())
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
