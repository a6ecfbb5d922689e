package x86

import (
	"cmp"
	"math/bits"
	"slices"

	"torpor/vmm/kvm"
)

// CPUID leaves (SDM volume 2A "CPUID"; APM volume 3 appendix E; the KVM leaves in cpuid.rst).
const (
	leafFeatures    = 0x1
	leafCache       = 0x4
	leafPower       = 0x6
	leafStructured  = 0x7
	leafPMU         = 0xa
	leafTopology    = 0xb
	leafXState      = 0xd
	leafSGX         = 0x12
	leafTrace       = 0x14
	leafLBR         = 0x1c
	leafTopologyV2  = 0x1f
	leafExtFeatures = 0x80000001
	leafExtPower    = 0x80000007
	leafSizes       = 0x80000008
	leafSVM         = 0x8000000a
	leafAMDCache    = 0x8000001d
	leafAMDTopology = 0x8000001e
	leafAMDPerfMon  = 0x80000022
	leafKVMFeatures = 0x40000001

	// leaf 1
	ecxVMX         = 1 << 5
	ecxPDCM        = 1 << 15
	ecxTSCDeadline = 1 << 24
	ecxXSave       = 1 << 26
	ecxOSXSave     = 1 << 27
	ecxHypervisor  = 1 << 31
	edxHTT         = 1 << 28
	// leaf 6
	eaxARAT = 1 << 2 // the APIC timer runs on in every sleep state: KVM emulates it
	// leaf 0x80000001
	ecxCmpLegacy  = 1 << 1
	ecxSVM        = 1 << 2
	ecxTopoExt    = 1 << 22
	ecxPerfCore   = 1 << 23
	ecxPerfNB     = 1 << 24
	ecxPerfL2     = 1 << 28
	perfExtension = ecxPerfCore | ecxPerfNB | ecxPerfL2
	// leaf 0x40000001
	kvmAsyncPF       = 1 << 4
	kvmAsyncPFVMExit = 1 << 10
	kvmAsyncPFInt    = 1 << 14
)

// CPU places one vCPU in its machine: one socket, one thread per core.
type CPU struct {
	ID, Count   int
	TSCDeadline bool // KVM offers CapTSCDeadlineTimer
	XSaveBytes  int  // size of the extended state KVM saves (CapXSave2); 0: no limit
	Template    Template
}

// unsaved are features whose state a snapshot does not carry: SGX, processor trace, shadow stacks and branch tracking, last branch
// records, memory encryption and counters are in MSRs or supervisor state that nobody here saves.
var unsaved = mask{
	{leafStructured, 0, ebx}: bit(2, 25),  // sgx intel_pt
	{leafStructured, 0, ecx}: bit(7, 30),  // shstk sgx_lc
	{leafStructured, 0, edx}: bit(19, 20), // arch_lbr ibt
}

// CPUID returns what CPU c is told: the host's supported table with topology, hypervisor and timer bits set and the features
// masked whose state a snapshot could not carry (nested virtualisation, performance counters, asynchronous page faults, what is in
// unsaved, and extended state beyond what KVM saves), and of the rest what the template leaves.
func CPUID(supported []kvm.CPUIDEntry, c CPU) []kvm.CPUIDEntry {
	var maxBasic uint32
	out := make([]kvm.CPUIDEntry, 0, len(supported)+3)
	for _, e := range supported {
		switch e.Function {
		case 0:
			maxBasic = e.EAX
		case leafTopology, leafTopologyV2, leafAMDPerfMon, leafSVM, leafSGX, leafTrace, leafLBR:
			continue // our own topology below; the others read as zero
		}
		c.patch(&e)
		out = append(out, e)
	}
	for _, leaf := range []uint32{leafTopology, leafTopologyV2} {
		if maxBasic >= leaf {
			out = append(out, c.topology(leaf)...)
		}
	}
	unsaved.clear(out)
	limit := c.XSaveBytes
	if limit == 0 {
		limit = maxXState
	}
	out = c.Template.apply(limitXState(out, ^uint64(0), limit))
	slices.SortStableFunc(out, func(a, b kvm.CPUIDEntry) int {
		return cmp.Or(cmp.Compare(a.Function, b.Function), cmp.Compare(a.Index, b.Index))
	})
	return out
}

// patch changes one leaf in place.
func (c CPU) patch(e *kvm.CPUIDEntry) {
	switch e.Function {
	case leafFeatures:
		c.features(e)
	case leafCache:
		if e.EAX&0x1f != 0 { // a cache of some type
			e.EAX = c.sharing(e.EAX)&0x3ffffff | uint32(c.Count-1)<<26
		}
	case leafAMDCache:
		if e.EAX&0x1f != 0 {
			e.EAX = c.sharing(e.EAX)
		}
	case leafPower:
		e.EAX |= eaxARAT
	case leafPMU:
		e.EAX, e.EBX, e.ECX, e.EDX = 0, 0, 0, 0
	case leafKVMFeatures:
		e.EAX &^= kvmAsyncPF | kvmAsyncPFVMExit | kvmAsyncPFInt
	case leafExtFeatures:
		e.ECX &^= ecxSVM | perfExtension | ecxCmpLegacy
		if c.Count > 1 && e.ECX&ecxTopoExt != 0 {
			e.ECX |= ecxCmpLegacy
		}
	case leafSizes:
		e.ECX = uint32(c.Count-1) | uint32(c.apicBits())<<12
	case leafAMDTopology:
		e.EAX, e.EBX, e.ECX, e.EDX = uint32(c.ID), uint32(c.ID), 0, 0
	}
}

// features patches leaf 1: initial APIC id, logical processors, timer and hypervisor bits.
func (c CPU) features(e *kvm.CPUIDEntry) {
	e.EBX = e.EBX&0xffff | uint32(c.Count)<<16 | uint32(c.ID)<<24
	e.ECX = e.ECX&^(ecxVMX|ecxPDCM|ecxTSCDeadline|ecxOSXSave) | ecxHypervisor
	if c.TSCDeadline {
		e.ECX |= ecxTSCDeadline
	}
	e.EDX &^= edxHTT
	if c.Count > 1 {
		e.EDX |= edxHTT
	}
}

// sharing sets bits 25:14, how many logical processors share a cache less one: L1 and L2 are a core's own.
func (c CPU) sharing(eax uint32) uint32 {
	eax &^= 0xfff << 14
	if level := eax >> 5 & 7; level >= 3 {
		eax |= uint32(c.Count-1) << 14
	}
	return eax
}

// apicBits is how many low bits of the APIC id number the cores of the socket.
func (c CPU) apicBits() int { return bits.Len(uint(c.Count - 1)) }

// topology returns leaf 0xb or 0x1f: level 0 is the (only) thread of a core, level 1 the cores of the socket, level 2 the end.
func (c CPU) topology(leaf uint32) []kvm.CPUIDEntry {
	const smt, core = 1 << 8, 2 << 8
	level := func(index, shift, count, kind uint32) kvm.CPUIDEntry {
		return kvm.CPUIDEntry{
			Function: leaf, Index: index, Flags: kvm.CPUIDSignificantIndex,
			EAX: shift, EBX: count, ECX: kind | index, EDX: uint32(c.ID),
		}
	}
	return []kvm.CPUIDEntry{
		level(0, 0, 1, smt),
		level(1, uint32(c.apicBits()), uint32(c.Count), core),
		level(2, 0, 0, 0),
	}
}
