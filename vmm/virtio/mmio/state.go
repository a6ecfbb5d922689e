package mmio

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"torpor/vmm/guestmem"
	"torpor/vmm/virtio/virtq"
)

// stateVersion is the version of a saved transport: a savedHead, a savedQueue per queue, the device's own bytes; all
// little-endian.
const stateVersion = 1

type savedHead struct {
	Version      uint32
	DeviceID     uint32
	Status       uint32
	Interrupt    uint32
	Generation   uint32
	NeedsReset   uint32
	DeviceSelect uint32
	DriverSelect uint32
	QueueSelect  uint32
	Queues       uint32
	Features     uint64
	Active       uint32
	DeviceBytes  uint32
}

type savedQueue struct {
	Desc, Avail, Used   uint64
	Size                uint16
	Ready               uint16
	LastAvail, NextUsed uint16
}

// Save returns the whole device: registers, queues and its own state. The device must be paused, and stays so. It may still
// write to guest memory, so memory is saved after it.
func (t *Transport) Save() ([]byte, error) { return t.save(t.dev.Save) }

// Copy is Save for a device that goes on as if nothing had happened. It writes nothing to guest memory.
func (t *Transport) Copy() ([]byte, error) {
	if c, ok := t.dev.(Copier); ok {
		return t.save(c.Copy)
	}
	return t.save(t.dev.Save)
}

func (t *Transport) save(deviceState func() ([]byte, error)) ([]byte, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.paused {
		return nil, ErrNotPaused
	}
	var device []byte
	if t.queues != nil {
		var err error
		if device, err = deviceState(); err != nil {
			return nil, fmt.Errorf("save virtio device %d: %w", t.dev.ID(), err)
		}
	}
	head := savedHead{
		Version: stateVersion, DeviceID: t.dev.ID(), Status: t.status,
		Interrupt: t.interrupt.Load(), Generation: t.generation.Load(), NeedsReset: flag(t.needsReset.Load()),
		DeviceSelect: t.deviceSelect, DriverSelect: t.driverSelect, QueueSelect: t.queueSelect,
		Queues: uint32(len(t.setups)), Features: t.driverFeatures, Active: flag(t.queues != nil), DeviceBytes: uint32(len(device)),
	}
	saved := make([]savedQueue, len(t.setups))
	for i, s := range t.setups {
		saved[i] = savedQueue{uint64(s.Desc), uint64(s.Avail), uint64(s.Used), s.Size, uint16(flag(s.ready)), 0, 0}
		if i < len(t.queues) {
			state := t.queues[i].State()
			saved[i].LastAvail, saved[i].NextUsed = state.LastAvail, state.NextUsed
		}
	}
	out, err := binary.Append(nil, binary.LittleEndian, head)
	if err == nil {
		out, err = binary.Append(out, binary.LittleEndian, saved)
	}
	return append(out, device...), err
}

// Load makes a fresh transport what Save saw, paused; guest memory must hold what it held then. After an error the
// transport is of no use.
func (t *Transport) Load(state []byte) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.status != 0 || t.queues != nil {
		return errors.New("load virtio device: it is in use")
	}
	if err := t.loadLocked(state); err != nil {
		return fmt.Errorf("load virtio device %d: %w", t.dev.ID(), err)
	}
	return nil
}

func (t *Transport) loadLocked(state []byte) error {
	r := bytes.NewReader(state)
	var head savedHead
	if err := binary.Read(r, binary.LittleEndian, &head); err != nil {
		return fmt.Errorf("state is cut short: %w", err)
	}
	switch {
	case head.Version != stateVersion:
		return fmt.Errorf("state is of version %d, this program reads %d", head.Version, stateVersion)
	case head.DeviceID != t.dev.ID() || head.Queues != uint32(len(t.setups)):
		return fmt.Errorf("state is of a device %d with %d queues", head.DeviceID, head.Queues)
	case head.Features&^t.offered() != 0:
		return fmt.Errorf("state uses features %#x, which this device lacks", head.Features&^t.offered())
	}
	saved := make([]savedQueue, head.Queues)
	if err := binary.Read(r, binary.LittleEndian, saved); err != nil {
		return fmt.Errorf("state is cut short: %w", err)
	}
	if int64(r.Len()) != int64(head.DeviceBytes) {
		return fmt.Errorf("state has %d bytes of the device, not %d", r.Len(), head.DeviceBytes)
	}
	t.status, t.driverFeatures = head.Status, head.Features
	t.deviceSelect, t.driverSelect, t.queueSelect = head.DeviceSelect, head.DriverSelect, head.QueueSelect
	t.interrupt.Store(head.Interrupt)
	t.generation.Store(head.Generation)
	t.needsReset.Store(head.NeedsReset != 0)
	for i, s := range saved {
		if s.Size == 0 || s.Size > t.setups[i].max {
			return fmt.Errorf("queue %d has %d descriptors", i, s.Size)
		}
		t.setups[i].Config = virtq.Config{
			Size: s.Size, Desc: guestmem.Addr(s.Desc), Avail: guestmem.Addr(s.Avail), Used: guestmem.Addr(s.Used),
		}
		t.setups[i].ready = s.Ready != 0
	}
	t.paused = true
	if head.Active == 0 {
		return nil
	}
	return t.loadActiveLocked(saved, state[len(state)-r.Len():])
}

// loadActiveLocked starts a device whose driver was running when it was saved.
func (t *Transport) loadActiveLocked(saved []savedQueue, device []byte) error {
	queues, err := t.buildLocked()
	if err != nil {
		return err
	}
	for i, q := range queues {
		q.SetState(virtq.State{LastAvail: saved[i].LastAvail, NextUsed: saved[i].NextUsed})
	}
	if err := t.dev.Load(device); err != nil {
		return err
	}
	if err := t.dev.Activate(t.driverFeatures, queues, t.Interrupt()); err != nil {
		return err
	}
	t.queues = queues
	return nil
}

func flag(b bool) uint32 {
	if b {
		return 1
	}
	return 0
}
