package machine

import (
	"fmt"

	"torpor/vmm/kvm"
	"torpor/vmm/snapshot"
)

// getMSRs reads MSRs and leaves out those that KVM lists but cannot read.
func (m *Machine) getMSRs(c *vcpu, indices []uint32) ([]snapshot.MSR, error) {
	var out []snapshot.MSR
	read := func(step []uint32) (int, error) {
		got, err := c.kvm.MSRs(step)
		for _, r := range got {
			out = append(out, snapshot.MSR{Index: r.Index, Data: r.Data})
		}
		return len(got), err
	}
	return out, batches(indices, read, func(index uint32, err error) {
		m.log.Debug().Err(err).Int("vcpu", c.id).Str("msr", fmt.Sprintf("%#x", index)).Msg("MSR cannot be read")
	})
}

// setMSRs writes MSRs. One that KVM refuses is skipped: hosts differ in what they let be written back, and what a guest cannot
// do without (EFER, the segment bases, the clocks) no host refuses.
func (m *Machine) setMSRs(c *vcpu, msrs []kvm.MSR) error {
	return batches(msrs, c.kvm.SetMSRs, func(r kvm.MSR, err error) {
		m.log.Debug().Err(err).Int("vcpu", c.id).Str("msr", fmt.Sprintf("%#x", r.Index)).
			Str("value", fmt.Sprintf("%#x", r.Data)).Msg("MSR was refused")
	})
}

// batches gives items to do, up to kvm.MaxMSRs at a time. Do treats them from the first on and says how many it did before one it
// refused, which is reported and skipped. Should a whole call fail, the rest is done one by one, to find out which of them it was
// for; that is an error only when none works.
func batches[T any](items []T, do func([]T) (int, error), refused func(T, error)) error {
	size, worked := kvm.MaxMSRs, false
	var last error
	for len(items) > 0 {
		step := items[:min(len(items), size)]
		n, err := do(step)
		switch {
		case err != nil && len(step) > 1:
			size = 1
			continue
		case err != nil:
			n, last = 0, err
		default:
			worked = true
		}
		items = items[n:]
		if n < len(step) {
			refused(step[n], err)
			items = items[1:]
		}
	}
	if !worked {
		return last
	}
	return nil
}
