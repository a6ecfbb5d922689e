package snapcache

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"

	"torpor/agent/durable"
)

const tmpSuffix = ".tmp"

// Cache makes and removes snapshots by the operations of a file system.
type Cache struct{ FS durable.FS }

// host is the Cache of whoever has no need to look at the operations.
var host = Cache{durable.OS{}}

// Draft is a snapshot in the making.
type Draft struct {
	fs     durable.FS
	final  string
	tmp    string
	links  map[string]File // linked files, by name
	layers map[string]bool // linked disk layers, by name
}

// Begin makes an empty draft of the snapshot dir. A draft of the same name that was left behind is removed.
func Begin(dir string) (*Draft, error) { return host.Begin(dir) }

// Begin makes an empty draft of the snapshot dir. A draft of the same name that was left behind is removed.
func (c Cache) Begin(dir string) (*Draft, error) {
	d := &Draft{fs: c.FS, final: dir, tmp: dir + tmpSuffix, links: map[string]File{}, layers: map[string]bool{}}
	switch _, err := readManifest(dir); {
	case err == nil || errors.Is(err, ErrVersion):
		return nil, fmt.Errorf("begin snapshot %s: %w", filepath.Base(dir), ErrExists)
	case !errors.Is(err, ErrNotExist) && !errors.Is(err, ErrCorrupt):
		return nil, err
	}
	for _, old := range []string{d.final, d.tmp} {
		if _, err := os.Lstat(old); errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err := d.fs.RemoveAll(old); err != nil {
			return nil, fmt.Errorf("begin snapshot %s: %w", filepath.Base(dir), err)
		}
	}
	if err := d.fs.Mkdir(d.tmp); err != nil {
		return nil, fmt.Errorf("begin snapshot %s: %w", filepath.Base(dir), err)
	}
	return d, nil
}

// Path returns where the file called name is to be written.
func (d *Draft) Path(name string) string { return filepath.Join(d.tmp, name) }

// Discard removes the draft. After a Publish that succeeded it removes nothing.
func (d *Draft) Discard() error { return d.fs.RemoveAll(d.tmp) }

// Publish makes the draft's files durable, writes the manifest with their sizes and sums, and moves the snapshot to its place.
// A file whose sum is among known is not read. When it returns an error nothing has been published.
func (d *Draft) Publish(m Manifest, known ...map[string]Sum) (*Snapshot, error) {
	sums := map[string]Sum{}
	for _, k := range known {
		for name, sum := range k {
			sums[name] = sum
		}
	}
	s, err := d.publish(m, sums)
	if err != nil {
		return nil, fmt.Errorf("publish snapshot %s: %w", filepath.Base(d.final), err)
	}
	return s, nil
}

func (d *Draft) publish(m Manifest, sums map[string]Sum) (*Snapshot, error) {
	files, err := d.seal(sums)
	if err != nil {
		return nil, err
	}
	m.Version, m.Files = Version, files
	if err := m.complete(); err != nil {
		return nil, err
	}
	raw, err := encodeManifest(m)
	if err != nil {
		return nil, err
	}
	steps := []struct {
		name string
		do   func() error
	}{
		{"manifest", func() error { return d.fs.Write(d.Path(manifestName), raw) }},
		{"sync draft", func() error { return d.fs.SyncDir(d.tmp) }},
		{"rename", func() error { return d.fs.Rename(d.tmp, d.final) }},
		{"sync parent", func() error { return d.fs.SyncDir(filepath.Dir(d.final)) }},
	}
	for _, s := range steps {
		if err := s.do(); err != nil {
			return nil, errors.Join(fmt.Errorf("%s: %w", s.name, err), d.takeBack())
		}
	}
	return &Snapshot{Dir: d.final, Manifest: m}, nil
}

// takeBack undoes a rename that could not be made durable: an error must mean that nothing was published.
func (d *Draft) takeBack() error {
	if _, err := os.Stat(d.tmp); err == nil {
		return nil
	}
	return Cache{d.fs}.Remove(d.final)
}

// seal syncs the draft's files and describes them.
func (d *Draft) seal(sums map[string]Sum) ([]File, error) {
	entries, err := os.ReadDir(d.tmp)
	if err != nil {
		return nil, err
	}
	var files []File
	for _, e := range entries {
		if d.layers[e.Name()] {
			continue
		}
		file, ok := d.links[e.Name()] // durable and described already
		if !ok {
			if file, err = d.sealFile(e.Name(), sums[e.Name()]); err != nil {
				return nil, fmt.Errorf("seal %s: %w", e.Name(), err)
			}
		}
		files = append(files, file)
	}
	sort.Slice(files, func(i, j int) bool { return files[i].Name < files[j].Name })
	return files, nil
}

func (d *Draft) sealFile(name string, sum Sum) (File, error) {
	path := d.Path(name)
	if err := d.fs.Sync(path); err != nil {
		return File{}, err
	}
	f, err := os.Open(path)
	if err != nil {
		return File{}, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return File{}, err
	}
	if !sum.known() {
		if sum.CRC32C, err = checksum(f); err != nil {
			return File{}, err
		}
	}
	if err := d.fs.Stamp(path, Untouched); err != nil {
		return File{}, err
	}
	return File{Name: name, Size: info.Size(), Sum: sum}, nil
}
