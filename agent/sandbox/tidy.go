package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"torpor/agent/snapcache"
	"torpor/agent/store"
)

// maxChain is how many own layers a disk may have below its top before they are merged: reads look into every one.
const maxChain = 4

// tidy bounds what the sandbox takes, beside whatever it does: it removes the files that nothing needs any more, seals disk
// layers that are not written any more, and merges layers when they are too many. Owner only.
func (s *Sandbox) tidy() {
	if s.m.ctx.Err() != nil {
		return
	}
	if s.tidies {
		s.untidy = true // what it has looked at already may be another now
		return
	}
	s.tidies, s.untidy = true, false
	s.tidying = s.goTask(func(ctx context.Context) {
		for again := true; again; {
			if err := s.clearUp(ctx); err != nil && ctx.Err() == nil {
				s.log.Warn().Err(err).Msg("clearing up old files")
			}
			again = false
			s.do(func() {
				again = s.untidy && ctx.Err() == nil
				s.tidies, s.untidy = again, false
			})
		}
	})
}

func (s *Sandbox) clearUp(ctx context.Context) error {
	if err := s.removeOldGenerations(); err != nil {
		return err
	}
	if err := s.removeUnusedLayers(); err != nil {
		return err
	}
	if err := s.mergeLayers(ctx); err != nil {
		return err
	}
	if err := s.sealLayers(ctx); err != nil {
		return err
	}
	return s.mergeMemory(ctx)
}

// removeOldGenerations removes those that have been replaced.
func (s *Sandbox) removeOldGenerations() error {
	all := s.generations()
	var gone []uint64
	s.do(func() {
		if s.state() != Pausing { // then one is in the making that the record does not count yet
			gone = superfluous(all, s.rec.Base, s.rec.Generation)
		}
	})
	for _, n := range gone {
		if err := s.m.snaps.Remove(s.paths.generation(n)); err != nil {
			return err
		}
	}
	return nil
}

// sealLayers gives the layers below the top checksums of what is in them, so that damage to them can be told.
func (s *Sandbox) sealLayers(ctx context.Context) error {
	var layers []string
	s.do(func() {
		layers = slices.Clone(s.rec.Layers)
		switch {
		case s.state() == Running && !s.live.unsure:
			layers = layers[:len(layers)-1]
		case s.state() != Paused:
			layers = nil
		}
	})
	for _, l := range layers {
		if err := s.m.cfg.Layers.Seal(ctx, s.paths.layer(l)); err != nil {
			return err
		}
	}
	return nil
}

// removeUnusedLayers removes the layer files that neither the record nor a generation names. The files are listed before the
// record is read, and a layer is recorded before it is made: so none that is in use can look unused.
func (s *Sandbox) removeUnusedLayers() error {
	files, err := os.ReadDir(s.paths.layers())
	if err != nil {
		return fmt.Errorf("list the layers: %w", err)
	}
	used := map[string]bool{}
	known := s.do(func() {
		mark(used, s.rec.Layers)
		if s.frozen != nil {
			mark(used, []string{s.frozen.top})
		}
		if s.rollback != nil {
			mark(used, s.rollback.layers)
		}
	})
	if !known {
		return nil
	}
	for _, n := range s.generations() {
		snap, err := snapcache.Manifested(s.paths.generation(n))
		if errors.Is(err, snapcache.ErrNotExist) {
			continue // removed meanwhile, or never published
		}
		if err != nil {
			return fmt.Errorf("which layers snapshot %d needs is unknown: %w", n, err)
		}
		mark(used, snap.Layers)
	}
	for _, f := range files {
		if used[f.Name()] || !strings.HasSuffix(f.Name(), layerSuffix) {
			continue
		}
		if err := s.m.cfg.FS.Remove(filepath.Join(s.paths.layers(), f.Name())); err != nil {
			return fmt.Errorf("remove an unused layer: %w", err)
		}
	}
	return nil
}

func mark(used map[string]bool, names []string) {
	for _, n := range names {
		used[n] = true
	}
}

// mergeLayers makes one layer out of all below the top when they are too many. The old ones stay for the generation that
// names them and for the VMM that has them open.
func (s *Sandbox) mergeLayers(ctx context.Context) error {
	var old []string
	var merged string
	var err error
	ran := s.do(func() {
		if s.state() != Running || s.live.unsure || len(s.rec.Layers) <= maxChain+1 {
			return
		}
		old, merged = slices.Clone(s.rec.Layers[:len(s.rec.Layers)-1]), layerName(s.rec.NextLayer)
		err = s.amend(func(r *store.Sandbox) { r.NextLayer++ })
	})
	if !ran || err != nil || merged == "" {
		return err
	}
	sources := make([]string, len(old))
	for i, l := range old {
		sources[i] = s.paths.layer(l)
	}
	if err := s.m.cfg.Layers.Merge(ctx, s.paths.layer(merged), sources); err != nil {
		return fmt.Errorf("merge %d layers: %w", len(old), err)
	}
	s.do(func() {
		if s.state() != Running || len(s.rec.Layers) < len(old) || !slices.Equal(s.rec.Layers[:len(old)], old) {
			return // the chain is another by now, or about to be one generation's; the merged file will be found unused
		}
		err = s.amend(func(r *store.Sandbox) { r.Layers = append([]string{merged}, r.Layers[len(old):]...) })
	})
	return err
}
