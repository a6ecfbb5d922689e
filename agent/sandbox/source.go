package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"torpor/agent/snapcache"
	"torpor/agent/store"
	"torpor/agent/template"
	"torpor/api/apierr"
	"torpor/api/vmmpb"
)

// What a start begins from.
const (
	ModeNone     = "none"     // the template: a new sandbox
	ModeFrozen   = "frozen"   // its memory, which is still resident
	ModeMemory   = "memory"   // the newest generation
	ModePrevious = "previous" // an older generation
	ModeCold     = "cold"     // its disk only
)

// source is one rung of the ladder: a start tries its sources in order, and goes on to the next only if one is damaged.
type source struct {
	mode       string
	generation uint64   // of memory and previous
	layers     []string // own disk layers below the new top; of a generation: nil, they are those of its manifest
}

func (f source) String() string {
	switch f.mode {
	case ModeMemory, ModePrevious:
		return fmt.Sprintf("%s (snapshot %d)", f.mode, f.generation)
	default:
		return f.mode
	}
}

// ladder lists what the sandbox can be resumed from with its memory, best first. Owner only.
func (s *Sandbox) ladder() []source {
	rungs := []source{{mode: ModeMemory, generation: s.rec.Generation}}
	all := s.generations()
	slices.Reverse(all)
	for _, n := range all {
		if n < s.rec.Generation {
			rungs = append(rungs, source{mode: ModePrevious, generation: n})
		}
	}
	return rungs
}

// damaged reports whether a start failed of its source's files, so that another source may do.
func damaged(err error) bool {
	return errors.Is(err, snapcache.ErrCorrupt) || errors.Is(err, snapcache.ErrNotExist) || isCode(err, apierr.SandboxBroken)
}

// restoreRequest names every file of a start from a snapshot or the template, and checks those that can be checked without
// reading much: the VMM checks the pages it reads.
func (s *Sandbox) restoreRequest(t *template.Template, from *source, top string) (*vmmpb.RestoreRequest, error) {
	req := &vmmpb.RestoreRequest{
		State: t.Snapshot.Path(template.StateFile), BaseMemory: t.Snapshot.Path(template.MemoryFile), WorkingSet: t.WorkingSet(),
	}
	if from.generation > 0 {
		snap, err := s.load(from.generation)
		if err != nil {
			return nil, err
		}
		if snap.Manifest.Parent != t.Digest {
			return nil, apierr.New(apierr.SandboxBroken, "snapshot %d builds on template %s, not on %s", from.generation, snap.Manifest.Parent, t.Digest)
		}
		if err := snap.Verify(stateFile); err != nil {
			return nil, err
		}
		if err := snap.Check(snap.Manifest.MemoryFiles()...); err != nil {
			return nil, err
		}
		req.State = snap.Path(stateFile)
		if snap.Manifest.Base != "" {
			req.BaseMemory, req.WorkingSet = snap.Path(snap.Manifest.Base), "" // that of the template is of another memory
		}
		for _, name := range snap.Manifest.Memory {
			req.MemoryLayers = append(req.MemoryLayers, snap.Path(name))
		}
		from.layers = snap.Manifest.Layers
	}
	layers, err := s.diskBelow(t, from.layers)
	if err != nil {
		return nil, err
	}
	req.Machine = s.machine(t, layers, top)
	return req, nil
}

// diskBelow returns the paths of the layers below a new top, each checked.
func (s *Sandbox) diskBelow(t *template.Template, own []string) ([]string, error) {
	layers := []string{t.Layer()}
	for _, l := range own {
		path := s.paths.layer(l)
		if err := s.m.cfg.Layers.Check(path); err != nil {
			return nil, &snapcache.PartError{Dir: s.paths.dir, Part: l, Reason: "the disk layer cannot be used: " + err.Error()}
		}
		layers = append(layers, path)
	}
	return layers, nil
}

func (s *Sandbox) machine(t *template.Template, layers []string, top string) *vmmpb.Machine {
	return t.Machine(layers, top, &vmmpb.Vsock{Cid: guestCID},
		&vmmpb.Console{Enabled: true, Log: s.paths.console(), MaxBytes: consoleBytes})
}

// templateOf returns the template of a start, whose memory and disk must be what they were.
func (s *Sandbox) templateOf(ctx context.Context, plan *startPlan) (*template.Template, error) {
	t := plan.template
	if t == nil {
		var err error
		if t, err = s.m.cfg.Templates.ByDigest(ctx, plan.digest); err != nil {
			return nil, fmt.Errorf("%w: %w", errTemplate, err)
		}
	}
	if err := t.Snapshot.Check(); err != nil {
		return nil, apierr.New(apierr.SandboxBroken, "%w: template %s: %w", errTemplate, t.ID, err)
	}
	return t, nil
}

// errTemplate says that a start failed of what all its sources have in common.
var errTemplate = errors.New("the template cannot be used")

// began is what changes in the record when a VM has been brought up from a source.
func (f source) began(r *store.Sandbox, top string) {
	r.ResumeMode = f.mode
	r.Layers = append(slices.Clone(f.layers), top)
	switch f.mode {
	case ModeFrozen: // the VM is the one it was
	case ModeCold:
		r.Base, r.Booted = 0, true
	default:
		r.Base, r.Booted = f.generation, false
	}
}
