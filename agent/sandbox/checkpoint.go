package sandbox

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"torpor/agent/kept"
	"torpor/agent/snapcache"
	"torpor/agent/store"
	"torpor/api/apierr"
	"torpor/api/vmmpb"
)

// checkpoint is the save of a running machine while it runs on. It is no operation: the sandbox stays what it is. A pause waits for
// its end, a kill ends it.
type checkpoint struct {
	cancel  context.CancelFunc
	done    chan struct{} // closed when it has ended
	expired bool          // the deadline passed meanwhile
}

// capture is what one checkpoint needs; nothing of it is the owner's.
type capture struct {
	live     *live
	top      string // path of the layer that the disk writes to from then on
	manifest snapcache.Manifest
	memory   generationPlan // how its memory is written: as a pause would, over what the machine was restored from
}

// KeepSnapshot keeps the present state of a sandbox, which is not disturbed, under an id. With the id of one that it has of this
// sandbox it returns that.
func (m *Manager) KeepSnapshot(ctx context.Context, sandboxID, snapshotID string) (kept.Info, error) {
	if have, ok := m.cfg.Kept.Get(snapshotID); ok && have.Manifest.Owner == sandboxID && have.Manifest.Kind == kept.Asked {
		return have, nil
	}
	s, err := m.Get(sandboxID)
	if err != nil {
		return kept.Info{}, err
	}
	return s.keep(ctx, snapshotID, kept.Asked)
}

// Snapshots lists the kept snapshots that were asked for, in the order of the ids.
func (m *Manager) Snapshots() []kept.Info { return m.cfg.Kept.List() }

// DeleteSnapshot removes a kept snapshot. What was made from it is not touched; not_found if there is none.
func (m *Manager) DeleteSnapshot(snapshotID string) error { return m.cfg.Kept.Delete(snapshotID) }

// keep makes a kept snapshot: of a running machine by a checkpoint, of a paused one by links of its newest generation.
func (s *Sandbox) keep(ctx context.Context, snapshotID, kind string) (kept.Info, error) {
	if err := s.m.checkSpace(); err != nil {
		return kept.Info{}, apierr.As(err).For(s.id)
	}
	draft, err := s.m.cfg.Kept.Begin(snapshotID)
	if err != nil {
		return kept.Info{}, err
	}
	manifest, sums, err := s.fill(ctx, draft)
	if err != nil {
		return kept.Info{}, errors.Join(err, draft.Discard())
	}
	manifest.Kind = kind
	info, err := draft.Publish(manifest, sums)
	if errors.Is(err, syscall.ENOSPC) {
		err = apierr.New(apierr.DiskFull, "there is no room for the snapshot: %w", err).For(s.id)
	}
	return info, err
}

// fill puts the state of the sandbox into a draft, whatever it is doing: it waits for what is under way.
func (s *Sandbox) fill(ctx context.Context, draft *kept.Draft) (snapcache.Manifest, map[string]snapcache.Sum, error) {
	for {
		var (
			manifest snapcache.Manifest
			plan     *capture
			point    *checkpoint
			wait     <-chan struct{}
			err      error
		)
		ran := s.do(func() {
			if wait = s.underWay(); wait != nil {
				return
			}
			switch s.state() {
			case Running:
				if plan, err = s.capture(draft); err == nil {
					point, ctx = s.beginCheckpoint(ctx)
				}
			case Paused:
				manifest, err = s.linkGeneration(draft)
			case Stopping:
				err = notFound(s.id)
			default:
				err = s.fail(apierr.NotReady, "the sandbox is %s (%s): there is no state of it to keep; resume it first", s.rec.State, s.rec.Reason)
			}
		})
		switch {
		case !ran:
			return manifest, nil, notFound(s.id)
		case err != nil:
			return manifest, nil, err
		case plan != nil:
			defer s.endCheckpoint(point)
			sums, err := s.checkpoint(ctx, draft, plan)
			return plan.manifest, sums, err
		case wait == nil:
			return manifest, nil, nil
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return manifest, nil, apierr.New(apierr.InTransition, "the sandbox is still changing its state; try again").For(s.id)
		}
	}
}

// underWay is closed when the operation or checkpoint under way has ended; nil if there is none. Owner only.
func (s *Sandbox) underWay() <-chan struct{} {
	switch {
	case s.state() == Stopping:
		return nil // nothing comes after it
	case s.op != nil:
		return s.op.done
	case s.point != nil:
		return s.point.done
	}
	return nil
}

// describe is the manifest of a kept snapshot of the sandbox as it is. Owner only.
func (s *Sandbox) describe() snapcache.Manifest {
	r := s.rec.Clone()
	return snapcache.Manifest{
		Owner: s.id, Template: r.TemplateID, Incarnation: r.Incarnation, Parent: r.TemplateDigest, VCPUs: r.VCPUs,
		MemoryBytes: r.MemoryBytes, DiskBytes: r.DiskBytes, EnvdVersion: r.EnvdVersion, CreatedAt: now(),
	}
}

// linkLayers puts the sandbox's own disk layers into a draft and names them there. Owner only.
func (s *Sandbox) linkLayers(draft *kept.Draft, layers []string) (names []string, err error) {
	for i, l := range layers {
		as := layerName(uint64(i + 1))
		if err := draft.LinkLayer(s.paths.layer(l), as); err != nil {
			return nil, err
		}
		names = append(names, as)
	}
	return names, nil
}

// linkGeneration puts the newest generation of a paused sandbox into a draft. It is links alone, and so the owner does it itself:
// nothing can be removed meanwhile. Owner only.
func (s *Sandbox) linkGeneration(draft *kept.Draft) (snapcache.Manifest, error) {
	snap, err := snapcache.Load(s.paths.generation(s.rec.Generation))
	if err != nil {
		return snapcache.Manifest{}, s.fail(apierr.SandboxBroken, "its snapshot cannot be used: %w", err)
	}
	for _, f := range snap.Manifest.Files {
		if err := draft.Link(snap, f.Name, f.Name); err != nil {
			return snapcache.Manifest{}, err
		}
	}
	m := s.describe()
	m.Incarnation, m.Base, m.Memory = snap.Manifest.Incarnation, snap.Manifest.Base, snap.Manifest.Memory
	m.Layers, err = s.linkLayers(draft, s.rec.Layers)
	return m, err
}

// capture prepares a checkpoint: the layers the disk has now are put into the draft, the last of which the machine still writes
// to, and a new top is made and recorded. So a machine that has got it is found with it in the record, and in one that has not
// it is one empty layer more. Owner only.
func (s *Sandbox) capture(draft *kept.Draft) (*capture, error) {
	c := &capture{live: s.live, manifest: s.describe()}
	var err error
	if c.manifest.Layers, err = s.linkLayers(draft, s.rec.Layers); err != nil {
		return nil, err
	}
	c.memory = s.planGeneration(s.rec.Clone(), 0)
	if err := s.m.checkRoom(c.memory.needs(s.resident) + stateRoom); err != nil {
		return nil, apierr.As(err).For(s.id).With(s.rec.State, string(s.envd.State))
	}
	if err := c.memory.link(draft.Draft); err != nil {
		return nil, err
	}
	c.manifest.Base, c.manifest.Memory = c.memory.manifest.Base, c.memory.manifest.Memory
	name := layerName(s.rec.NextLayer)
	c.top = s.paths.layer(name)
	if err := s.m.cfg.FS.Remove(c.top); err != nil { // of an agent that ended before it was recorded
		return nil, err
	}
	if err := s.m.cfg.Layers.Create(c.top, s.rec.DiskBytes); err != nil {
		return nil, fmt.Errorf("make the disk layer: %w", err)
	}
	err = s.amend(func(r *store.Sandbox) { r.Layers, r.NextLayer = append(r.Layers, name), r.NextLayer+1 })
	if err != nil {
		return nil, errors.Join(err, s.m.cfg.FS.Remove(c.top))
	}
	c.live.unsure = true
	return c, nil
}

// beginCheckpoint marks a checkpoint as under way; its context ends with it, with the caller's, and with the agent. Owner only.
func (s *Sandbox) beginCheckpoint(ctx context.Context) (*checkpoint, context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(s.m.ctx, cancel)
	s.point = &checkpoint{done: make(chan struct{}), cancel: func() { stop(); cancel() }}
	return s.point, ctx
}

// endCheckpoint lets what waited for a checkpoint go on.
func (s *Sandbox) endCheckpoint(point *checkpoint) {
	point.cancel()
	s.do(func() {
		s.point = nil
		if s.state() == Running && s.op == nil {
			s.afterCheckpoint(point)
		}
	})
	close(point.done)
}

// afterCheckpoint does what a checkpoint held up. Owner only.
func (s *Sandbox) afterCheckpoint(point *checkpoint) {
	switch {
	case len(s.pausers) > 0, s.rollback != nil:
		if err := s.beginPause("paused by request"); err != nil {
			s.settlePausers(apierr.As(err))
		}
	case point.expired:
		s.expired()
	default:
		s.tidy() // the chain of disk layers has grown by one
	}
}

// deferPause has a pause begin when the checkpoint under way has ended; false if there is none. Until then the sandbox serves.
// Owner only.
func (s *Sandbox) deferPause() bool {
	if s.point == nil {
		return false
	}
	s.point.expired = true // if nobody asked for the pause, it was the deadline
	return true
}

// checkpoint has the machine save itself while it runs on.
func (s *Sandbox) checkpoint(ctx context.Context, draft *kept.Draft, c *capture) (map[string]snapcache.Sum, error) {
	budget, cancel := context.WithTimeout(ctx, s.m.cfg.Budgets.Save)
	defer cancel()
	began := time.Now()
	resp, err := c.live.vm.Checkpoint(budget, &vmmpb.CheckpointRequest{
		Kind: c.memory.kind, State: draft.Path(stateFile), Memory: draft.Path(c.memory.file), Tops: []string{c.top},
	})
	if err != nil {
		return nil, s.checkpointError(ctx, err)
	}
	times := phases{"stopped": float64(resp.StoppedUs) / 1000}
	times.add("checkpoint", began)
	s.do(func() {
		c.live.unsure = false
		c.live.tops++
		s.tellOfSnapshot(times)
	})
	return c.memory.sums(resp.GetSaved()), nil
}

// tellOfSnapshot records that the running sandbox was saved, and how long it stood still for that. Owner only.
func (s *Sandbox) tellOfSnapshot(times phases) {
	event := store.Event{
		At: now(), Type: "snapshot", From: s.rec.State, To: s.rec.State, Reason: "saved while it runs on",
		Incarnation: s.rec.Incarnation, Phases: times,
	}
	if err := s.m.cfg.Store.Append(s.m.undying, s.id, event); err != nil {
		s.log.Error().Err(err).Msg("an event is not recorded")
		return
	}
	s.become(s.rec, s.envd, []store.Event{event})
}

// checkpointError is what the caller of a checkpoint that failed is told. The sandbox goes on.
func (s *Sandbox) checkpointError(ctx context.Context, cause error) error {
	failure := notFound(s.id)
	s.do(func() {
		switch {
		case s.state() == Stopping:
		case errors.Is(s.m.ctx.Err(), context.Canceled):
			failure = errDraining.For(s.id)
		case errors.Is(cause, syscall.ENOSPC), isCode(cause, apierr.DiskFull):
			failure = s.fail(apierr.DiskFull, "there is no room for the snapshot: %w", cause)
		case s.state() != Running:
			failure = s.fail(apierr.NotReady, "the sandbox ended while it was being saved: %s", s.rec.Reason)
		default:
			failure = s.fail(apierr.NotReady, "the sandbox runs on, but it could not be saved; try again: %w", because(ctx, cause))
		}
	})
	return failure
}
