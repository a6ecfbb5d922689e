package machine

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/rs/zerolog"

	"torpor/vmm/kvm"
	"torpor/vmm/snapshot"
)

// Snapshot is the open files of a saved machine.
type Snapshot struct {
	State  *os.File
	Base   *os.File   // flat memory image
	Layers []*os.File // pages that differ from what is below, oldest first; none when the saved machine is the base itself

	Recording  bool     // memory is brought in page by page, so that a working set is what was touched and nothing else
	WorkingSet *os.File // what to read ahead (Machine.WorkingSet), of this memory or of one below it; nil for nothing
}

// Phases is how long the parts of a restore took.
type Phases struct {
	Open    time.Duration // files opened, state decoded and verified
	KVM     time.Duration // VM, vCPUs, memory
	Devices time.Duration // devices, state set
}

// Restore makes a machine from a saved one. It runs when Restore returns, unless stopped is set. The snapshot's files must not
// change while the machine lives. They are the machine's, see Config.
func Restore(cfg Config, from Snapshot, stopped bool, log zerolog.Logger) (_ *Machine, phases Phases, err error) {
	begin := time.Now()
	lap := func(d *time.Duration) {
		now := time.Now()
		*d, begin = now.Sub(begin), now
	}
	defer func() {
		closeFiles(from.State, from.WorkingSet)
		if err != nil {
			closeFiles(append(from.Layers, from.Base)...)
			cfg.close()
		}
	}()
	err = cfg.validate()
	if from.State == nil || from.Base == nil {
		err = errors.Join(err, fmt.Errorf("%w: a snapshot is at least a state and a base memory", ErrConfig))
	}
	if len(from.Layers) > maxLayers {
		err = errors.Join(err, fmt.Errorf("%w: %d memory layers, at most %d are possible", ErrConfig, len(from.Layers), maxLayers))
	}
	if err != nil {
		return nil, phases, err
	}
	state, err := snapshot.ReadStateFile(from.State)
	if err != nil {
		return nil, phases, err
	}
	mem, err := newRestoredRAM(from.Base, cfg.MemoryBytes)
	if err != nil {
		return nil, phases, err
	}
	if err := mem.applyLayers(from.Layers, state); err != nil {
		mem.close()
		return nil, phases, err
	}
	if from.Recording {
		if err := mem.readSingly(); err != nil {
			mem.close()
			return nil, phases, err
		}
	}
	if from.WorkingSet != nil {
		mem.prefetch, from.WorkingSet = startPrefetch(mem, from.WorkingSet, log), nil
	}
	mem.startVerifier()
	lap(&phases.Open)
	m, err := assemble(cfg, mem, log)
	if err != nil {
		return nil, phases, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.Close())
		}
	}()
	lap(&phases.KVM)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.loadLocked(state); err != nil {
		return nil, phases, err
	}
	if !stopped {
		m.runLocked()
	}
	lap(&phases.Devices)
	return m, phases, nil
}

// loadLocked puts the saved state into a fresh machine and leaves it paused, as Pause would.
func (m *Machine) loadLocked(s *snapshot.State) error {
	if d := s.Shape.Difference(m.shape); d != "" {
		return &snapshot.Error{Part: "state, section shape 0", Err: fmt.Errorf("%w: %s", snapshot.ErrMismatch, d)}
	}
	if err := errors.Join(m.checkCPU(s.CPU), m.checkHost(s.Host)); err != nil {
		return err
	}
	m.baseSums = s.Memory.Sums
	if err := m.restoreVCPUs(s.VCPUs); err != nil {
		return err
	}
	if err := m.loadIRQChips(s.IRQChips); err != nil {
		return err
	}
	// Before any vCPU runs, or the guest sees the host's uptime first and its own past afterwards.
	if err := m.vm.SetClock(s.Clock); err != nil {
		return fmt.Errorf("restore clock: %w", err)
	}
	m.clock = s.Clock
	return m.loadDevices(s)
}

func (m *Machine) loadIRQChips(chips [][]byte) error {
	if len(chips) != len(irqChips) {
		return &snapshot.Error{Part: "state, section vm 0", Err: fmt.Errorf("%w: %d interrupt controllers", snapshot.ErrFormat, len(chips))}
	}
	for i, id := range irqChips {
		var c kvm.IRQChip
		if err := unpack(chips[i], &c); err != nil {
			return &snapshot.Error{Part: "state, section vm 0", Err: err}
		}
		c.ID = id
		if err := m.vm.SetIRQChip(&c); err != nil {
			return fmt.Errorf("restore interrupt controllers: %w", err)
		}
	}
	return nil
}

func (m *Machine) loadDevices(s *snapshot.State) error {
	part := func(name string) string { return fmt.Sprintf("state, device %s", name) }
	for _, slot := range m.bus.slots {
		b, ok := s.Device(slot.name)
		if !ok {
			return &snapshot.Error{Part: part(slot.name), Err: fmt.Errorf("%w: it was saved without", snapshot.ErrMismatch)}
		}
		if err := slot.transport.Load(b); err != nil {
			return &snapshot.Error{Part: part(slot.name), Err: err}
		}
	}
	// A device of the snapshot that this machine lacks would vanish from under its driver.
	for _, d := range s.Devices {
		has := slices.ContainsFunc(m.bus.slots, func(slot *slot) bool { return slot.name == d.Name })
		if !has && d.Name != serialName {
			return &snapshot.Error{Part: part(d.Name), Err: fmt.Errorf("%w: this machine has no such device", snapshot.ErrMismatch)}
		}
	}
	if m.bus.ports.Serial == nil {
		return nil
	}
	b, _ := s.Device(serialName)
	if err := m.bus.ports.Serial.Load(b); err != nil {
		return &snapshot.Error{Part: part(serialName), Err: err}
	}
	return nil
}
