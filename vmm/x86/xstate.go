package x86

import "torpor/vmm/kvm"

// Components of the extended state that are user state (XCR0 bits; SDM volume 1, section 13.1).
const (
	xstateX87    = 1 << 0
	xstateSSE    = 1 << 1
	xstateAVX    = 1 << 2
	xstateMPX    = 3 << 3 // BNDREGS, BNDCSR
	xstateAVX512 = 7 << 5 // opmask, ZMM_Hi256, Hi16_ZMM
	xstatePKRU   = 1 << 9
	xstateAMX    = 3 << 17 // TILECFG, TILEDATA

	// xstateLegacy is the size of the x87 and SSE area with the header after it, in bytes.
	xstateLegacy = 576
)

// xstateGroups are components of use only together, with the features that need them.
var xstateGroups = []struct {
	components uint64
	features   mask
}{
	{xstateAVX, mask{{leafFeatures, 0, ecx}: bit(12, 28, 29), {leafStructured, 0, ebx}: bit(5), {leafStructured, 0, ecx}: bit(9, 10)}},
	{xstateMPX, mask{{leafStructured, 0, ebx}: bit(14)}},
	{xstateAVX512, mask{
		{leafStructured, 0, ebx}: bit(16, 17, 21, 26, 27, 28, 30, 31), {leafStructured, 0, ecx}: bit(1, 6, 11, 12, 14),
		{leafStructured, 0, edx}: bit(2, 3, 8, 23), {leafStructured, 1, eax}: bit(5),
	}},
	{xstatePKRU, mask{{leafStructured, 0, ecx}: bit(3)}},
	{xstateAMX, mask{{leafStructured, 0, edx}: bit(22, 24, 25)}},
}

// limitXState reduces leaf 0xd to the components that are in keep and fit an area of limit bytes, which is what KVM saves, and
// takes away the features that need the others. Supervisor components go altogether: KVM_GET_XSAVE does not carry them. Without
// XSAVE there is no leaf 0xd.
func limitXState(table []kvm.CPUIDEntry, keep uint64, limit int) []kvm.CPUIDEntry {
	var have uint64
	xsave := false
	for _, e := range table {
		switch {
		case e.Function == leafFeatures:
			xsave = e.ECX&ecxXSave != 0
		case e.Function == leafXState && e.Index == 0:
			have = uint64(e.EDX)<<32 | uint64(e.EAX)
		}
	}
	if !xsave {
		have = 0
	}
	have &= keep
	for _, e := range table {
		if e.Function == leafXState && e.Index >= 2 && e.Index < 64 && uint64(e.EBX)+uint64(e.EAX) > uint64(limit) {
			have &^= 1 << e.Index
		}
	}
	for _, g := range xstateGroups {
		if have&g.components != g.components {
			have &^= g.components
			g.features.clear(table)
		}
	}
	size := uint32(xstateLegacy)
	out := table[:0]
	for _, e := range table {
		if e.Function == leafXState {
			if have == 0 || e.Index >= 64 || e.Index >= 2 && have>>e.Index&1 == 0 {
				continue
			}
			if e.Index >= 2 {
				size = max(size, e.EBX+e.EAX)
			}
		}
		out = append(out, e)
	}
	for i := range out {
		e := &out[i]
		switch {
		case e.Function == leafXState && e.Index == 0:
			e.EAX, e.ECX, e.EDX = uint32(have), size, uint32(have>>32)
		case e.Function == leafXState && e.Index == 1:
			e.ECX, e.EDX = 0, 0 // IA32_XSS: no supervisor component
		}
	}
	return out
}
