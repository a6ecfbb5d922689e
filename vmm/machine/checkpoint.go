package machine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"torpor/vmm/cow"
	"torpor/vmm/memview"
	"torpor/vmm/snapshot"
	"torpor/vmm/virtio/mmio"
)

// Checkpoint is where a snapshot of a running machine goes. All files are the machine's from the call on.
type Checkpoint struct {
	Kind           SaveKind
	BytesPerSecond uint64     // see SaveOptions
	State, Memory  *os.File   // empty, open for reading and writing
	Tops           []*os.File // for each disk that can be written an empty layer, its new top (cow.Chain.Freeze)
}

// Checkpoint saves a running machine as Save does, and lets it run on: connections of its guest last, and its disks write to new
// tops from that instant on. The machine stands still while its state is taken and its page tables are copied (package
// memview), and runs while memory is written; it returns how long it stood still. An error before the disks have their new tops
// leaves the machine as it was; after one that comes later only the files are of no use.
//
// What was saved is right whatever becomes of the machine afterwards: it may be paused, and its guest may end. The end of ctx,
// or Close, ends the checkpoint.
func (m *Machine) Checkpoint(ctx context.Context, to Checkpoint) (_ Saved, stopped time.Duration, err error) {
	defer func() { err = errors.Join(err, to.State.Close(), to.Memory.Close()) }()
	if !m.checkpointing.TryLock() {
		closeFiles(to.Tops...)
		return Saved{}, 0, ErrCheckpoint
	}
	defer m.checkpointing.Unlock()
	pace, err := newPace(to.BytesPerSecond)
	if err != nil {
		closeFiles(to.Tops...)
		return Saved{}, 0, err
	}
	ctx, cancel := m.whileOpen(ctx)
	defer cancel()
	begin := time.Now()
	i, err := m.takeInstant(to, &begin)
	if err != nil {
		return Saved{}, 0, err
	}
	stopped = time.Since(begin)
	defer func() { err = errors.Join(err, i.view.Close()) }()
	saved, err := m.write(i.plan, viewed{m.ram, i.view, ctx}, to.State, to.Memory, pace)
	return saved, stopped, err
}

// whileOpen is ctx, which also ends when Close is called.
func (m *Machine) whileOpen(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, end := context.WithCancelCause(ctx)
	go func() {
		select {
		case <-m.closing:
			end(ErrEnded)
		case <-ctx.Done():
		}
	}()
	return ctx, func() { end(nil) }
}

// instant is a machine at one instant.
type instant struct {
	plan savePlan
	view *memview.View
}

// takeInstant stops the machine for as long as it takes, from begin on. The new tops are the disks', or closed.
func (m *Machine) takeInstant(to Checkpoint, begin *time.Time) (i instant, err error) {
	if err := m.checkTo(to); err != nil {
		closeFiles(to.Tops...)
		return i, err
	}
	if err := m.ram.verifier.wait(); err != nil {
		closeFiles(to.Tops...)
		return i, err
	}
	tops, err := m.readyTops(to.Tops)
	if err != nil {
		return i, err
	}
	defer func() {
		closeTops(tops)
		if err != nil && i.view != nil {
			err = errors.Join(err, i.view.Close())
		}
	}()
	if err := m.flushLocked(); err != nil { // most of it now, so that the rest is short
		return i, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch State(m.state.Load()) {
	case Ended:
		return i, ErrEnded
	case Paused:
		return i, ErrNotRunning
	case Running:
	}
	*begin = time.Now()
	m.haltLocked()
	defer m.runLocked()
	if len(m.endings) > 0 { // a vCPU has ended, and the supervisor waits for us
		return i, ErrEnded
	}
	if err := m.quiesceLocked(); err != nil {
		return i, err
	}
	if i.plan, err = m.planLocked(to.Kind, (*mmio.Transport).Copy); err != nil {
		return i, err
	}
	if i.view, err = memview.Take(); err != nil {
		return i, err
	}
	rest := tops
	tops = nil // the disks', or closed
	return i, m.freezeLocked(rest)
}

// checkTo is an ErrConfig (wrapped) for files that cannot be written to.
func (m *Machine) checkTo(to Checkpoint) error {
	return errors.Join(m.checkTops(to.Tops), m.canSaveMemory(to.Kind), checkEmpty(to.State), checkEmpty(to.Memory))
}

func (m *Machine) checkTops(tops []*os.File) error {
	writable := 0
	for _, d := range m.disks {
		if !d.ReadOnly() {
			writable++
		}
	}
	if len(tops) != writable {
		return fmt.Errorf("%w: %d new tops for %d disks that can be written", ErrConfig, len(tops), writable)
	}
	return nil
}

// readyTops makes new tops ready for the disks, in the order of those that can be written. It takes the files over, and closes
// them if it fails.
func (m *Machine) readyTops(files []*os.File) (tops []*cow.Next, err error) {
	for i, d := range m.disks {
		if d.ReadOnly() {
			continue
		}
		next, err := d.Ready(files[0])
		files = files[1:]
		if err != nil {
			closeFiles(files...)
			closeTops(tops)
			return nil, fmt.Errorf("disk %s: %w", m.shape.Disks[i].ID, err)
		}
		tops = append(tops, next)
	}
	return tops, nil
}

func closeTops(tops []*cow.Next) {
	for _, top := range tops {
		_ = top.Close() // nothing was written to it
	}
}

// freezeLocked gives the disks their new tops, and closes those that it does not come to.
func (m *Machine) freezeLocked(tops []*cow.Next) error {
	for i, d := range m.disks {
		if d.ReadOnly() {
			continue
		}
		if err := d.FreezeWith(tops[0]); err != nil {
			closeTops(tops[1:])
			return fmt.Errorf("disk %s: %w", m.shape.Disks[i].ID, err)
		}
		tops = tops[1:]
	}
	return nil
}

// savePlan is what is to be written of a machine, as it was when it stood still.
type savePlan struct {
	kind    SaveKind
	state   *snapshot.State
	layer   *layerPlan // nil: a full memory
	written *pageSet   // of a full memory: pages that may differ from the base
}

// planLocked takes the state of a machine that stands still. of is how a device is saved: it may still write to memory, whose
// pages are looked for after it.
func (m *Machine) planLocked(kind SaveKind, of func(*mmio.Transport) ([]byte, error)) (p savePlan, err error) {
	p.kind = kind
	if p.state, err = m.stateLocked(of); err != nil {
		return p, err
	}
	if kind == SaveFull {
		p.written, err = m.ram.written(m.host.pagemap)
	} else {
		p.layer, err = m.ram.planLayer(kind, m.host.pagemap)
	}
	return p, err
}
