package machine

import (
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"torpor/vmm/kvm"
)

// fakeMSRs is a KVM that refuses some MSRs by a short count, as KVM_GET_MSRS and KVM_SET_MSRS do, and fails calls with others in
// them altogether.
type fakeMSRs struct {
	refuses, fails []uint32
	done           []uint32
	calls          int
}

func (f *fakeMSRs) do(step []uint32) (int, error) {
	f.calls++
	if len(step) > kvm.MaxMSRs {
		return -1, unix.E2BIG
	}
	if slices.ContainsFunc(step, func(i uint32) bool { return slices.Contains(f.fails, i) }) {
		return -1, unix.EFAULT
	}
	for n, index := range step {
		if slices.Contains(f.refuses, index) {
			return n, nil
		}
		f.done = append(f.done, index)
	}
	return len(step), nil
}

// One MSR that cannot be read aborted Cloud Hypervisor's snapshots (#1543), and KVM on this or that host refuses a few.
func TestRefusedMSRsAreSkipped(t *testing.T) {
	var many []uint32
	for i := range uint32(3*kvm.MaxMSRs + 7) {
		many = append(many, i)
	}
	first, last := many[0], many[len(many)-1]
	for _, c := range []struct {
		name           string
		items          []uint32
		refuses, fails []uint32
		err            error
		calls          int
	}{
		{name: "none", calls: 0},
		{name: "all go", items: many, calls: 4},
		{name: "the first", items: many, refuses: []uint32{first}, calls: 5},
		{name: "the last", items: many, refuses: []uint32{last}, calls: 4},
		{name: "at the end of a batch", items: many, refuses: []uint32{kvm.MaxMSRs - 1, kvm.MaxMSRs}, calls: 5},
		{name: "neighbours", items: many, refuses: []uint32{7, 8, 9}, calls: 6},
		{name: "all are refused", items: many[:3], refuses: many[:3], calls: 3},
		{name: "a failed call", items: many[:5], fails: []uint32{2}, calls: 6},
		{name: "failed and refused", items: many[:5], refuses: []uint32{1}, fails: []uint32{3}, calls: 6},
		{name: "nothing works", items: many[:5], fails: many, err: unix.EFAULT, calls: 6},
		{name: "the only one", items: many[:1], fails: many, err: unix.EFAULT, calls: 1},
	} {
		f := fakeMSRs{refuses: c.refuses, fails: c.fails}
		var skipped, want []uint32
		err := batches(c.items, f.do, func(index uint32, _ error) { skipped = append(skipped, index) })
		if err != c.err { //nolint:errorlint // the very error of the fake
			t.Errorf("%s: %v, want %v", c.name, err, c.err)
		}
		for _, index := range c.items {
			if !slices.Contains(c.refuses, index) && !slices.Contains(c.fails, index) {
				want = append(want, index)
			}
		}
		if got := slices.Compact(slices.Sorted(slices.Values(f.done))); !slices.Equal(got, want) {
			t.Errorf("%s: %d done, want %d", c.name, len(got), len(want))
		}
		if len(skipped)+len(want) != len(c.items) {
			t.Errorf("%s: %d skipped of %d", c.name, len(skipped), len(c.items))
		}
		if f.calls != c.calls {
			t.Errorf("%s: %d calls, want %d", c.name, f.calls, c.calls)
		}
	}
}
