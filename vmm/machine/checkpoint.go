package machine

import (
	"errors"
	"fmt"
	"os"
	"time"

	"torpor/vmm/virtio/mmio"
)

// Checkpoint is where a snapshot of a running machine goes. All files are the machine's from the call on.
type Checkpoint struct {
	Kind          SaveKind
	State, Memory *os.File   // empty, open for reading and writing
	Tops          []*os.File // for each disk that can be written an empty layer, its new top (cow.Chain.Freeze)
}

// Checkpoint saves a running machine as Save does, and lets it run on: connections of its guest last, and its disks write to new
// tops from that instant on. It returns how long the vCPUs stood still. An error before the disks have their new tops leaves the
// machine as it was; after one that comes later only the files are of no use.
func (m *Machine) Checkpoint(to Checkpoint) (_ Saved, stopped time.Duration, err error) {
	defer func() { err = errors.Join(err, to.State.Close(), to.Memory.Close()) }()
	if !m.checkpointing.TryLock() {
		closeFiles(to.Tops...)
		return Saved{}, 0, ErrCheckpoint
	}
	defer m.checkpointing.Unlock()
	if err := m.checkTo(to); err != nil {
		closeFiles(to.Tops...)
		return Saved{}, 0, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch State(m.state.Load()) {
	case Ended:
		closeFiles(to.Tops...)
		return Saved{}, 0, ErrEnded
	case Paused:
		closeFiles(to.Tops...)
		return Saved{}, 0, ErrNotRunning
	case Running:
	}
	begin := time.Now()
	saved, err := m.checkpointLocked(to)
	return saved, time.Since(begin), err
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

// checkpointLocked stops the machine and saves it, and has it running again when it returns.
func (m *Machine) checkpointLocked(to Checkpoint) (Saved, error) {
	m.haltLocked()
	defer m.runLocked()
	saved, err := m.saveRunningLocked(to)
	if err != nil {
		closeFiles(to.Tops...)
		return Saved{}, err
	}
	return saved, m.freezeLocked(to.Tops)
}

func (m *Machine) saveRunningLocked(to Checkpoint) (Saved, error) {
	if len(m.endings) > 0 { // a vCPU has ended, and the supervisor waits for us
		return Saved{}, ErrEnded
	}
	if err := m.quiesceLocked(); err != nil {
		return Saved{}, err
	}
	state, err := m.stateLocked((*mmio.Transport).Copy)
	if err != nil {
		return Saved{}, err
	}
	return m.writeLocked(to.Kind, state, to.State, to.Memory)
}

// freezeLocked gives the disks their new tops.
func (m *Machine) freezeLocked(tops []*os.File) error {
	for i, d := range m.disks {
		if d.ReadOnly() {
			continue
		}
		if err := d.Freeze(tops[0]); err != nil {
			closeFiles(tops[1:]...)
			return fmt.Errorf("disk %s: %w", m.shape.Disks[i].ID, err)
		}
		tops = tops[1:]
	}
	return nil
}
