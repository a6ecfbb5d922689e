package machine

import (
	"errors"
	"fmt"

	"torpor/vmm/ratelimit"
	"torpor/vmm/virtio"
)

// wireNet adds a network card. A tap that goes away is no end of the machine: the guest sees its link go down.
func (m *Machine) wireNet(n Net, u *undo) error {
	rx, rxErr := ratelimit.New(n.LimitRX, ratelimit.System())
	tx, txErr := ratelimit.New(n.LimitTX, ratelimit.System())
	if err := errors.Join(rxErr, txErr); err != nil {
		return err
	}
	dev, err := virtio.NewNet(n.Tap, n.MAC, virtio.NetLimits{RX: rx, TX: tx}, func(err error) {
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
