package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"sync"

	"torpor/agent/snapcache"
	"torpor/agent/store"
	"torpor/agent/vmproc"
	"torpor/api/vmmpb"
)

// reconcile compares the records with what lives and with the files, and makes the records true. It removes only what is
// provably this agent's and ownerless: VMMs started for its run directory that no running sandbox claims, files of removed
// sandboxes, drafts that were never published.
func (m *Manager) reconcile() error {
	records, err := m.cfg.Store.Sandboxes(m.ctx)
	if err != nil {
		return err
	}
	known := map[string]bool{}
	var all sync.WaitGroup
	for _, rec := range records {
		known[rec.ID] = true
		if !rec.RemovedAt.IsZero() {
			if err := m.cfg.FS.RemoveAll(m.dir(rec.ID)); err != nil {
				return fmt.Errorf("remove what is left of sandbox %s: %w", rec.ID, err)
			}
			continue
		}
		s := newSandbox(m, rec)
		m.byID[rec.ID] = s
		all.Go(s.awake)
	}
	all.Wait()
	m.warnOfStrangers(known)
	if err := m.endStrays(); err != nil {
		return err
	}
	for _, s := range slices.Collect(maps.Values(m.byID)) { // one that ends takes itself out of the map
		s.resolveEnd()
		m.run(s)
	}
	m.loops.Go(m.watchMemory)
	return nil
}

// warnOfStrangers reports directories without a record: their data may be somebody's, so they stay.
func (m *Manager) warnOfStrangers(known map[string]bool) {
	entries, err := os.ReadDir(m.cfg.Dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		m.cfg.Log.Warn().Err(err).Msg("list the sandbox directories")
	}
	for _, e := range entries {
		if !known[e.Name()] {
			m.cfg.Log.Warn().Str("dir", m.dir(e.Name())).Msg("a sandbox directory without a record; it is left alone")
		}
	}
}

// endStrays ends the VMMs that no sandbox has taken over.
func (m *Manager) endStrays() error {
	found, err := m.cfg.VMMs.Scan()
	if err != nil {
		return err
	}
	for _, f := range found {
		if s := m.byID[f.Name]; s != nil && s.vm != nil && s.vm.Identity() == f.Identity {
			continue
		}
		m.cfg.Log.Info().Str("name", f.Name).Int("pid", f.Identity.PID).Msg("ending a VMM that nobody owns")
		ctx, cancel := context.WithTimeout(m.ctx, m.cfg.Budgets.Kill)
		err := m.cfg.VMMs.End(ctx, f.Identity)
		cancel()
		if err != nil {
			return fmt.Errorf("end the ownerless VMM process %d: %w", f.Identity.PID, err)
		}
	}
	return nil
}

// awake makes the record of one sandbox true after the agent was away. It runs before the loop does and so is the owner.
func (s *Sandbox) awake() {
	if swept, err := s.m.snaps.Sweep(s.paths.dir, genPrefix); err != nil {
		s.log.Warn().Err(err).Msg("sweep unpublished snapshots")
	} else if len(swept) > 0 {
		s.log.Info().Strs("removed", swept).Msg("unpublished snapshots")
	}
	if s.state() != Pausing { // there it would be a pause that came about; here, a rollback that was not recorded
		if err := s.removeLaterGenerations(); err != nil {
			s.log.Warn().Err(err).Msg("remove an unrecorded snapshot")
		}
	}
	switch s.state() {
	case Running:
		s.awakeRunning()
	case Pausing:
		s.awakePausing()
	case Resuming:
		s.awakeResuming()
	case Paused:
		s.awakePaused()
	default: // what can only end is ended by resolveEnd; what has stopped stays so
	}
}

const interrupted = "interrupted by a restart of the agent"

// awakeRunning takes the VM over if it lives.
func (s *Sandbox) awakeRunning() {
	vm, err := s.adopt()
	if err != nil {
		s.lost(err)
		return
	}
	s.takeOver(vm)
}

// removeLaterGenerations removes the generations after the recorded one: nobody was told of them.
func (s *Sandbox) removeLaterGenerations() error {
	for _, n := range s.generations() {
		if n > s.rec.Generation {
			if err := s.m.snaps.Remove(s.paths.generation(n)); err != nil {
				return err
			}
		}
	}
	return nil
}

// awakePausing looks how far the pause came: a published snapshot is the truth, and otherwise the VM runs on.
func (s *Sandbox) awakePausing() {
	generation := s.rec.NextGen - 1
	if snap, err := s.load(generation); err == nil {
		s.snapshotBytes = snap.AllocatedBytes()
		s.settle(transition{to: Paused, reason: s.rec.Reason, change: func(r *store.Sandbox) {
			r.Generation, r.Layers, r.EndAt, r.Proc = generation, snap.Manifest.Layers, now(), store.Proc{}
		}})
		return // its VMM, if it lives, is a stray now
	}
	vm, err := s.adopt()
	if err != nil {
		s.lost(err)
		return
	}
	s.settle(transition{to: Running, reason: "the pause was " + interrupted + "; the sandbox goes on", change: s.withoutUnmadeTop})
	s.takeOver(vm)
}

// withoutUnmadeTop drops a top that was to be made for a pause and is not there. One that is there may be what the VM writes to.
func (s *Sandbox) withoutUnmadeTop(r *store.Sandbox) {
	last := len(r.Layers) - 1
	if _, err := os.Stat(s.paths.layer(r.Layers[last])); errors.Is(err, fs.ErrNotExist) && last > 0 {
		r.Layers = r.Layers[:last]
	}
}

// awakeResuming goes back to what it was: nothing has been served in the incarnation that was being started. It was paused if its
// disk is that of the newest snapshot, and else a run had ended after that.
func (s *Sandbox) awakeResuming() {
	to, before := Paused, s.rec.Layers[:max(0, len(s.rec.Layers)-1)]
	if snap, err := snapcache.Manifested(s.paths.generation(s.rec.Generation)); err != nil || !slices.Equal(snap.Layers, before) {
		to = Stopped
	}
	s.settle(transition{to: to, reason: "the resume was " + interrupted, change: func(r *store.Sandbox) {
		r.Layers, r.Proc = before, store.Proc{}
	}})
	if to == Paused {
		s.awakePaused()
	}
}

// awakePaused looks whether there is a snapshot to wake from. A VM that was kept frozen is a stray now.
func (s *Sandbox) awakePaused() {
	usable, cause := false, error(nil)
	for _, rung := range s.ladder() {
		snap, err := s.load(rung.generation)
		if err == nil {
			s.snapshotBytes, usable = snap.AllocatedBytes(), true
			break
		}
		s.log.Error().Err(err).Uint64("generation", rung.generation).Msg("a snapshot of a paused sandbox cannot be used")
		cause = errors.Join(cause, err)
	}
	if !usable {
		s.settle(transition{to: Failed, reason: "its snapshot cannot be used: " + cause.Error()})
	}
	if s.rec.Proc == (store.Proc{}) {
		s.publish()
		return
	}
	s.tierEvent(interrupted)
}

// lost says what became of a VM that is not there any more.
func (s *Sandbox) lost(cause error) {
	reason := "the VM could not be taken over after a restart of the agent: " + cause.Error()
	if errors.Is(cause, vmproc.ErrGone) {
		reason = "the VM ended while no agent ran (a restart of the host ends every VM)"
	}
	s.settle(transition{to: Stopped, reason: reason, change: runEnded})
}

// adopt takes hold of the recorded VMM and makes sure that the guest runs.
func (s *Sandbox) adopt() (VM, error) {
	p := s.rec.Proc
	if p.PID == 0 {
		return nil, vmproc.ErrGone
	}
	ctx, cancel := context.WithTimeout(s.m.ctx, s.m.cfg.Budgets.Pause)
	defer cancel()
	vm, err := s.m.cfg.VMMs.Adopt(ctx, s.id, vmproc.Identity{PID: p.PID, Start: p.Start, Boot: p.Boot})
	if err != nil {
		return nil, err
	}
	if err := runs(ctx, vm); err != nil {
		vm.Detach()
		return nil, err
	}
	return vm, nil
}

// runs makes a VM that a pause left stopped run on; one whose guest has ended is an error.
func runs(ctx context.Context, vm VM) error {
	status, err := vm.Status(ctx, &vmmpb.StatusRequest{})
	if err != nil {
		return err
	}
	switch status.State {
	case "running":
		return nil
	case "paused":
		_, err := vm.Resume(ctx, &vmmpb.ResumeRequest{})
		return err
	default:
		return fmt.Errorf("the guest is %s %s", status.State, status.EndReason)
	}
}

// takeOver serves with a VM of an earlier agent. envd has to prove itself again.
func (s *Sandbox) takeOver(vm VM) {
	if snap, err := snapcache.Load(s.paths.generation(s.rec.Generation)); err == nil {
		s.snapshotBytes = snap.AllocatedBytes()
	}
	s.setEnvd(EnvdStatus{State: Starting, Version: s.rec.EnvdVersion}, "the agent was restarted", nil)
	s.serve(&live{
		unsure: true, // a pause may have been cut short
		vm:     vm, guest: s.m.cfg.Guests(s.m.cfg.VMMs.VsockSocket(s.id)), incarnation: s.rec.Incarnation, done: make(chan struct{}),
	})
	s.armAt(s.rec.EndAt)
}

// resolveEnd carries on with what can only end: a kill that was cut short, and a creation, of which nobody was told that it
// succeeded. Strays have been ended by now, so that there is no VM left.
func (s *Sandbox) resolveEnd() {
	if s.state() == Creating {
		s.settle(transition{to: Stopping, reason: "the creation was " + interrupted})
	}
	if s.state() == Stopping {
		s.end()
	}
}

// Wanted lists the templates that sandboxes and kept snapshots of this host need.
func (m *Manager) Wanted() []string {
	m.mu.RLock()
	defer m.mu.RUnlock()
	digests := m.cfg.Kept.Digests()
	for _, s := range m.byID {
		if d := s.view.Load().TemplateDigest; !slices.Contains(digests, d) {
			digests = append(digests, d)
		}
	}
	return digests
}
