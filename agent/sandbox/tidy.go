package sandbox

import (
	"context"
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

// tidy removes what the resume that just succeeded made superfluous and bounds the layer chain, beside the running sandbox.
// Owner only.
func (s *Sandbox) tidy() {
	if s.tidying != nil {
		select {
		case <-s.tidying.done:
		default:
			return // the next resume will do
		}
	}
	s.tidying = s.goTask(func(ctx context.Context) {
		if err := s.clearUp(ctx); err != nil && ctx.Err() == nil {
			s.log.Warn().Err(err).Msg("clearing up old files")
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
	return s.mergeLayers(ctx)
}

// removeOldGenerations removes the generations before the newest, which has been resumed once and so is known to be good.
func (s *Sandbox) removeOldGenerations() error {
	newest := s.View().Generation
	for _, n := range s.generations() {
		if n < newest {
			if err := snapcache.Remove(s.paths.generation(n)); err != nil {
				return err
			}
		}
	}
	return nil
}

// generations lists the numbers of the generations on the disk.
func (s *Sandbox) generations() []uint64 {
	entries, err := os.ReadDir(s.paths.dir)
	if err != nil {
		return nil
	}
	var all []uint64
	for _, e := range entries {
		if n, ok := generationOf(e.Name()); ok {
			all = append(all, n)
		}
	}
	return all
}

// removeUnusedLayers removes the layer files that neither the record nor a generation names. The files are listed before the
// record is read, and a layer is recorded before it is made: so none that is in use can look unused.
func (s *Sandbox) removeUnusedLayers() error {
	files, err := os.ReadDir(s.paths.layers())
	if err != nil {
		return fmt.Errorf("list the layers: %w", err)
	}
	used := map[string]bool{}
	if !s.do(func() { mark(used, s.rec.Layers) }) {
		return nil
	}
	for _, n := range s.generations() {
		snap, err := snapcache.Load(s.paths.generation(n))
		if err != nil {
			return fmt.Errorf("which layers snapshot %d needs is unknown: %w", n, err)
		}
		mark(used, snap.Manifest.Layers)
	}
	for _, f := range files {
		if used[f.Name()] || !strings.HasSuffix(f.Name(), layerSuffix) {
			continue
		}
		if err := os.Remove(filepath.Join(s.paths.layers(), f.Name())); err != nil {
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
		if s.state() != Running || len(s.rec.Layers) <= maxChain+1 || s.live.unsure {
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
		if len(s.rec.Layers) < len(old) || !slices.Equal(s.rec.Layers[:len(old)], old) || s.state() == Stopping {
			return // the chain is another by now; the merged file will be found unused
		}
		err = s.amend(func(r *store.Sandbox) { r.Layers = append([]string{merged}, r.Layers[len(old):]...) })
	})
	return err
}
