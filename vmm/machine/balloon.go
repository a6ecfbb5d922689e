package machine

import (
	"context"
	"errors"
	"fmt"

	"torpor/vmm/virtio"
)

// ErrNoBalloon means that the machine was made without a balloon.
var ErrNoBalloon = errors.New("the machine has no balloon")

func (m *Machine) wireBalloon(c *Balloon, u *undo) error {
	if c == nil {
		return nil
	}
	m.balloon = virtio.NewBalloon(m.ram, c.Reporting)
	return m.addSlot(m.balloon, u)
}

// SetBalloon sets how many bytes of memory the guest should give back. It does not wait for that; Status tells how far it
// got. A paused guest is told when it runs.
func (m *Machine) SetBalloon(target uint64) error {
	switch {
	case m.balloon == nil:
		return ErrNoBalloon
	case State(m.state.Load()) == Ended:
		return ErrEnded
	case target > m.shape.MemoryBytes:
		return fmt.Errorf("%w: a balloon of %d bytes in memory of %d", ErrConfig, target, m.shape.MemoryBytes)
	}
	m.balloon.SetTarget(target)
	return nil
}

// BalloonStats asks the guest for statistics of its memory and waits for them until ctx ends. The error is ErrNoBalloon,
// ErrEnded, or wraps virtio.ErrNoStatistics.
func (m *Machine) BalloonStats(ctx context.Context) (virtio.BalloonStatus, error) {
	switch {
	case m.balloon == nil:
		return virtio.BalloonStatus{}, ErrNoBalloon
	case State(m.state.Load()) == Ended:
		return virtio.BalloonStatus{}, ErrEnded
	}
	if err := m.balloon.Refresh(ctx); err != nil {
		return virtio.BalloonStatus{}, err
	}
	return m.balloon.Status(), nil
}
