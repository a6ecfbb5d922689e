package machine

import (
	"errors"
	"fmt"

	"torpor/vmm/virtio"
)

// wireNet adds a network card. A tap that goes away is no end of the machine: the guest sees its link go down.
func (m *Machine) wireNet(n Net, u *undo) error {
	dev, err := virtio.NewNet(n.Tap, n.MAC, func(err error) {
		m.log.Error().Err(err).Str("net", n.ID).Msg("the guest's network is down")
	})
	if errors.Is(err, virtio.ErrTap) {
		err = fmt.Errorf("%w: %w", ErrConfig, err)
	}
	if err != nil {
		return fmt.Errorf("open network card %s: %w", n.ID, err)
	}
	u.add(func() { _ = dev.Close() })
	m.nets = append(m.nets, dev)
	return m.addSlot(dev, u)
}
