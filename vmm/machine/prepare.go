package machine

import (
	"fmt"

	"torpor/vmm/kvm"
	"torpor/vmm/x86"
)

// Prepared is what a machine needs of KVM and can be had before it is known which machine: the VM, its interrupt controllers and
// its vCPUs, each with its thread.
type Prepared struct {
	vm    *kvm.VM
	vcpus []*vcpu
}

// Prepare makes what a machine of so many vCPUs needs.
func (h *Host) Prepare(vcpus int) (_ *Prepared, err error) {
	if vcpus < 1 || vcpus > x86.MaxVCPUs {
		return nil, fmt.Errorf("%w: %d vCPUs, want 1 to %d", ErrConfig, vcpus, x86.MaxVCPUs)
	}
	p := &Prepared{}
	if p.vm, err = h.kvm.CreateVM(); err != nil {
		return nil, fmt.Errorf("create VM: %w", err)
	}
	defer func() {
		if err != nil {
			p.Close()
		}
	}()
	for _, step := range []func() error{
		func() error { return p.vm.SetTSSAddr(x86.TSSAddr) },
		func() error { return p.vm.SetIdentityMapAddr(x86.IdentityAddr) },
		p.vm.CreateIRQChip, // before the vCPUs, each of which gets a local one then
	} {
		if err := step(); err != nil {
			return nil, fmt.Errorf("set up VM: %w", err)
		}
	}
	for id := range vcpus {
		c, err := newVCPU(p.vm, id)
		if err != nil {
			return nil, err
		}
		p.vcpus = append(p.vcpus, c)
	}
	return p, nil
}

// take gives out what is in it, or nothing if that is not for so many vCPUs.
func (p *Prepared) take(vcpus int) *Prepared {
	if p == nil || len(p.vcpus) != vcpus {
		return nil
	}
	taken := *p
	*p = Prepared{}
	return &taken
}

// Close frees what was not taken. A nil Prepared is nothing.
func (p *Prepared) Close() {
	if p == nil || p.vm == nil {
		return
	}
	for _, c := range p.vcpus {
		c.close()
	}
	_ = p.vm.Close()
	*p = Prepared{}
}
