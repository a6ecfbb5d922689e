package x86

import (
	"fmt"
	"slices"
	"strings"

	"torpor/vmm/kvm"
)

// Names of CPU templates. A template is what the CPUs of a fleet have in common: guests are told of nothing else, so that a
// snapshot made on one host runs on all.
const (
	// TemplateHost tells guests all that KVM offers; "" means the same.
	TemplateHost = "host"
	// TemplateV2 and TemplateV3 are the micro-architecture levels of the x86-64 psABI (section 3.1.1, table 3.1).
	TemplateV2 = "x86-64-v2"
	TemplateV3 = "x86-64-v3"
)

// Template is a named selection of CPU features. The zero value is TemplateHost.
type Template struct {
	name     string
	required mask   // what the psABI level promises to programs
	allowed  mask   // what is left of the host's features
	xstate   uint64 // what is left of XCR0
}

// FindTemplate returns the template with the given name; the error names those there are.
func FindTemplate(name string) (Template, error) {
	if name == "" || name == TemplateHost {
		return Template{}, nil
	}
	var names []string
	for _, t := range templates() {
		if t.name == name {
			return t, nil
		}
		names = append(names, t.name)
	}
	return Template{}, fmt.Errorf("no CPU template %q: there are %s, %s", name, TemplateHost, strings.Join(names, ", "))
}

// Name is the template's name, "" for TemplateHost.
func (t Template) Name() string { return t.name }

// Required returns, as CPUID results, the feature bits without which a CPU cannot take the template; none for TemplateHost.
func (t Template) Required() []kvm.CPUIDEntry {
	var out []kvm.CPUIDEntry
	for w, b := range t.required {
		e := kvm.CPUIDEntry{Function: w.leaf, Index: w.index}
		*w.of(&e) = b
		if i := slices.IndexFunc(out, func(o kvm.CPUIDEntry) bool { return o.Function == w.leaf && o.Index == w.index }); i >= 0 {
			*w.of(&out[i]) = b
			continue
		}
		out = append(out, e)
	}
	return out
}

// apply masks a table: of the words that hold features only allowed bits are left, and leaves that describe features no
// template has are dropped, which makes them read as zero.
func (t Template) apply(table []kvm.CPUIDEntry) []kvm.CPUIDEntry {
	if t.name == "" {
		return table
	}
	table = slices.DeleteFunc(table, func(e kvm.CPUIDEntry) bool { return !slices.Contains(templateLeaves, e.Function) })
	for i := range table {
		e := &table[i]
		for _, w := range featureWords {
			if w.leaf == e.Function && (w.index == e.Index || w.index == everyIndex && e.Index > 0) {
				*w.of(e) &= t.allowed[w]
			}
		}
	}
	return limitXState(table, t.xstate, maxXState)
}

// maxXState is no limit for limitXState.
const maxXState = 1 << 30

// templateLeaves are the leaves a template leaves in place: identity, caches, topology, address sizes, and those in featureWords.
var templateLeaves = []uint32{
	0x0, leafFeatures, 0x2, leafCache, 0x5, leafPower, leafStructured, leafTopology, leafXState, leafTopologyV2,
	0x40000000, leafKVMFeatures,
	0x80000000, leafExtFeatures, 0x80000002, 0x80000003, 0x80000004, 0x80000005, 0x80000006, leafExtPower, leafSizes,
	leafAMDCache, leafAMDTopology,
}

// everyIndex stands in a word for all sub-leaves but 0.
const everyIndex = ^uint32(0)

// featureWords are the results of CPUID whose bits are features. Leaf 0xd, sub-leaf 0 is limitXState's.
var featureWords = []word{
	{leafFeatures, 0, ecx},
	{leafFeatures, 0, edx},
	{leafPower, 0, eax},
	{leafStructured, 0, ebx},
	{leafStructured, 0, ecx},
	{leafStructured, 0, edx},
	{leafStructured, everyIndex, eax},
	{leafStructured, everyIndex, ebx},
	{leafStructured, everyIndex, ecx},
	{leafStructured, everyIndex, edx},
	{leafXState, 1, eax},
	{leafKVMFeatures, 0, eax},
	{leafExtFeatures, 0, ecx},
	{leafExtFeatures, 0, edx},
	{leafExtPower, 0, edx},
	{leafSizes, 0, ebx},
}

// templates builds the table of templates: for each, the bits of its psABI level, and the bits beyond the level that every
// server CPU of that level has and a kernel makes use of.
//
// The bits by which a kernel mitigates speculation stay as the host has them, in all templates: hiding them would leave the
// guest open, and they come with microcode, which a fleet shares. A host that lacks one refuses the snapshot by its name.
func templates() []Template {
	baseline := mask{
		{leafFeatures, 0, edx}:    bit(0, 8, 15, 23, 24, 25, 26), // fpu cx8 cmov mmx fxsr sse sse2
		{leafExtFeatures, 0, edx}: bit(11, 29),                   // syscall lm
	}
	platform := mask{
		{leafFeatures, 0, ecx}:    bit(21, 24, 31),                                             // x2apic tsc_deadline_timer hypervisor, all KVM's own
		{leafFeatures, 0, edx}:    bit(1, 2, 3, 4, 5, 6, 7, 9, 11, 12, 13, 14, 16, 17, 19, 28), // vme de pse tsc msr pae mce apic sep mtrr pge mca pat pse36 clflush ht
		{leafPower, 0, eax}:       bit(2),                                                      // arat
		{leafStructured, 0, edx}:  bit(10, 26, 27, 28, 29, 31),                                 // md_clear spec_ctrl stibp flush_l1d arch_capabilities ssbd
		{leafKVMFeatures, 0, eax}: bit(0, 1, 3, 5, 6, 7, 9, 11, 12, 13, 24),                    // kvmclock nop_io_delay clocksource2 steal_time pv_eoi pv_unhalt tlb_flush send_ipi poll_control sched_yield clocksource_stable
		{leafExtFeatures, 0, ecx}: bit(1, 22),                                                  // cmp_legacy topoext: topology
		{leafExtFeatures, 0, edx}: bit(20, 27) | amdCopies,                                     // nx rdtscp
		{leafExtPower, 0, edx}:    bit(8),                                                      // constant_tsc
		{leafSizes, 0, ebx}:       bit(12, 14, 15, 16, 17, 18, 19, 24, 25, 26, 28),             // ibpb ibrs stibp, their modes, ssbd virt_ssbd ssb_no psfd
	}
	v2 := mask{
		{leafFeatures, 0, ecx}:    bit(0, 9, 13, 19, 20, 23), // sse3 ssse3 cx16 sse4_1 sse4_2 popcnt
		{leafExtFeatures, 0, ecx}: bit(0),                    // lahf_lm
	}
	v3 := mask{
		{leafFeatures, 0, ecx}:    bit(12, 22, 26, 28, 29), // fma movbe xsave avx f16c; osxsave is the guest's to set
		{leafStructured, 0, ebx}:  bit(3, 5, 8),            // bmi1 avx2 bmi2
		{leafExtFeatures, 0, ecx}: bit(5),                  // lzcnt
	}
	v3Platform := mask{
		{leafFeatures, 0, ecx}:    bit(1, 25, 30), // pclmulqdq aes rdrand
		{leafStructured, 0, ebx}:  bit(0, 7),      // fsgsbase smep
		{leafXState, 1, eax}:      bit(0),         // xsaveopt
		{leafExtFeatures, 0, edx}: bit(26),        // pdpe1gb
	}
	return []Template{
		{TemplateV2, union(baseline, v2), union(baseline, platform, v2), xstateX87 | xstateSSE},
		{TemplateV3, union(baseline, v2, v3), union(baseline, platform, v2, v3, v3Platform), xstateX87 | xstateSSE | xstateAVX},
	}
}

// amdCopies are the bits of leaf 1 EDX that AMD repeats in leaf 0x80000001 (APM volume 3, appendix E.4.2).
const amdCopies = 0x0183f3ff

// register selects one of the four results of CPUID.
type register uint8

const (
	eax register = iota
	ebx
	ecx
	edx
)

// word is a result of CPUID whose bits are features.
type word struct {
	leaf, index uint32
	register    register
}

// of returns the word's place in its leaf.
func (w word) of(e *kvm.CPUIDEntry) *uint32 {
	return [...]*uint32{&e.EAX, &e.EBX, &e.ECX, &e.EDX}[w.register]
}

// mask is a set of feature bits.
type mask map[word]uint32

// clear takes the mask's bits out of a table.
func (m mask) clear(table []kvm.CPUIDEntry) {
	for i := range table {
		for w, b := range m {
			if e := &table[i]; w.leaf == e.Function && w.index == e.Index {
				*w.of(e) &^= b
			}
		}
	}
}

func union(masks ...mask) mask {
	out := mask{}
	for _, m := range masks {
		for w, b := range m {
			out[w] |= b
		}
	}
	return out
}

// bit returns a word with the numbered bits set.
func bit(numbers ...uint) uint32 {
	var v uint32
	for _, n := range numbers {
		v |= 1 << n
	}
	return v
}
