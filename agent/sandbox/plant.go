package sandbox

import (
	"fmt"
	"path/filepath"

	"torpor/agent/snapcache"
)

// plant makes a generation of this sandbox out of a kept snapshot, whose disk layers get names of the sandbox. All of it is links:
// the sandbox does not need the snapshot afterwards. The generation is published last.
func (s *Sandbox) plant(snap *snapcache.Snapshot, generation uint64, layers []string) (*snapcache.Snapshot, error) {
	fs := s.m.cfg.FS
	if err := fs.Mkdir(s.paths.layers()); err != nil {
		return nil, fmt.Errorf("make the layer directory: %w", err)
	}
	for i, from := range snap.Manifest.Layers {
		to := s.paths.layer(layers[i])
		if err := fs.Remove(to); err != nil { // of an attempt that was cut short
			return nil, fmt.Errorf("share a disk layer: %w", err)
		}
		if err := fs.Link(snap.Path(from), to); err != nil {
			return nil, fmt.Errorf("share a disk layer: %w", err)
		}
	}
	for _, dir := range []string{s.paths.layers(), s.paths.dir, filepath.Dir(s.paths.dir)} {
		if err := fs.SyncDir(dir); err != nil {
			return nil, fmt.Errorf("share the disk layers: %w", err)
		}
	}
	draft, err := snapcache.Cache{FS: fs}.Begin(s.paths.generation(generation))
	if err != nil {
		return nil, err
	}
	for _, f := range snap.Manifest.Files {
		if err := draft.Link(snap, f.Name, f.Name); err != nil {
			return nil, err
		}
	}
	m := snap.Manifest
	m.Kind, m.Owner, m.Template, m.Generation, m.Layers = "generation", s.id, "", generation, layers
	return draft.Publish(m)
}

// layerNames are the names of n layers, of which the first is numbered.
func layerNames(n int, first uint64) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = layerName(first + uint64(i))
	}
	return names
}
