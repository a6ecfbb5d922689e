package x86_test

import (
	"slices"
	"strings"
	"testing"

	"torpor/vmm/kvm"
	"torpor/vmm/x86"
)

// everything is the table of a CPU with every feature there is, and extended state up to AMX.
func everything() []kvm.CPUIDEntry {
	all := ^uint32(0)
	table := []kvm.CPUIDEntry{
		{Function: 0, EAX: 0x20, EBX: 0x756e6547},
		{Function: 1, EBX: 0x800, ECX: all, EDX: all},
		{Function: 6, EAX: all &^ 4},
		{Function: 7, EAX: 2, EBX: all, ECX: all, EDX: all},
		{Function: 7, Index: 1, EAX: all, EBX: all, ECX: all, EDX: all},
		{Function: 7, Index: 2, EDX: all},
		{Function: 0xd, EAX: 0x600e7 | 1<<9, EBX: 576, ECX: 11008},
		{Function: 0xd, Index: 1, EAX: 0x1f, ECX: 0x1900, EDX: 1},
		{Function: 0x12, EAX: all},
		{Function: 0x14, EBX: all},
		{Function: 0x1c, EAX: all},
		{Function: 0x1d, EAX: 1},
		{Function: 0x20, EBX: 1},
		{Function: 0x40000001, EAX: all},
		{Function: 0x80000001, ECX: all, EDX: all},
		{Function: 0x80000007, EDX: all},
		{Function: 0x80000008, EAX: 0x3030, EBX: all},
		{Function: 0x80000021, EAX: all},
	}
	for _, c := range []struct{ index, bytes, offset, flags uint32 }{
		{2, 256, 576, 0},
		{5, 64, 1088, 0},
		{6, 512, 1152, 0},
		{7, 1024, 1664, 0},
		{9, 8, 2688, 0},
		{11, 16, 0, 1},
		{17, 64, 2752, 2},
		{18, 8192, 2816, 6},
	} {
		table = append(table, kvm.CPUIDEntry{Function: 0xd, Index: c.index, EAX: c.bytes, EBX: c.offset, ECX: c.flags})
	}
	return table
}

func template(t *testing.T, name string) x86.Template {
	t.Helper()
	got, err := x86.FindTemplate(name)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func TestTemplatesAreFoundByName(t *testing.T) {
	for _, name := range []string{x86.TemplateHost, ""} {
		if got := template(t, name); got.Name() != "" || got.Required() != nil {
			t.Errorf("%q is %q", name, got.Name())
		}
	}
	for _, name := range []string{x86.TemplateV2, x86.TemplateV3} {
		if got := template(t, name); got.Name() != name || len(got.Required()) == 0 {
			t.Errorf("%q is %q", name, got.Name())
		}
	}
	_, err := x86.FindTemplate("x86-64-v9")
	if err == nil || !strings.Contains(err.Error(), "x86-64-v9") || !strings.Contains(err.Error(), "host, x86-64-v2, x86-64-v3") {
		t.Errorf("unknown name: %v", err)
	}
}

// The expected words are written from the psABI table and the manuals, not from the code.
func TestTemplateLeavesWhatItStates(t *testing.T) {
	for _, c := range []struct {
		name                     string
		ecx1, ebx7, xcr0, ecxExt uint32
		xsaveSize                uint32
	}{
		{x86.TemplateV2, 0x81b82201, 0, 0, 0x400001, 0},
		{x86.TemplateV3, 0xf7f83203, 0x1a9, 7, 0x400021, 832},
	} {
		got := x86.CPUID(everything(), x86.CPU{Count: 1, TSCDeadline: true, Template: template(t, c.name)})
		one, _ := find(got, 1, 0)
		seven, _ := find(got, 7, 0)
		ext, _ := find(got, 0x80000001, 0)
		xstate, isThere := find(got, 0xd, 0)
		if one.ECX != c.ecx1 || one.EDX != 0x078bfbff {
			t.Errorf("%s: leaf 1 ECX %#x, want %#x; EDX %#x", c.name, one.ECX, c.ecx1, one.EDX)
		}
		if seven.EBX != c.ebx7 || seven.ECX != 0 || seven.EDX != 0xbc000400 {
			t.Errorf("%s: leaf 7 %#x %#x %#x", c.name, seven.EBX, seven.ECX, seven.EDX)
		}
		if ext.ECX != c.ecxExt || ext.EDX&(1<<29|1<<20|1<<11) != 1<<29|1<<20|1<<11 || ext.EDX&(1<<31|1<<30|1<<22) != 0 {
			t.Errorf("%s: leaf 0x80000001 ECX %#x EDX %#x", c.name, ext.ECX, ext.EDX)
		}
		if isThere != (c.xcr0 != 0) || xstate.EAX != c.xcr0 || xstate.ECX != c.xsaveSize || xstate.EDX != 0 {
			t.Errorf("%s: leaf 0xd %+v", c.name, xstate)
		}
		if kvmBits, _ := find(got, 0x40000001, 0); kvmBits.EAX != 0x01003aeb {
			t.Errorf("%s: KVM features %#x", c.name, kvmBits.EAX)
		}
		for _, e := range got {
			gone := slices.Contains([]uint32{0x12, 0x14, 0x1c, 0x1d, 0x20, 0x80000021}, e.Function)
			if gone || e.Function == 7 && e.Index > 0 && e.EAX|e.EBX|e.ECX|e.EDX != 0 || e.Function == 0xd && e.Index > 2 {
				t.Errorf("%s: leaf %#x.%d is left: %+v", c.name, e.Function, e.Index, e)
			}
		}
		for _, need := range template(t, c.name).Required() {
			have, _ := find(got, need.Function, need.Index)
			if need.EAX&^have.EAX|need.EBX&^have.EBX|need.ECX&^have.ECX|need.EDX&^have.EDX != 0 {
				t.Errorf("%s requires %+v and leaves %+v", c.name, need, have)
			}
		}
	}
}

// Extended state that KVM would cut off (Firecracker lost AMX state so) is not offered, nor are the features that need it.
func TestExtendedStateIsWhatIsSaved(t *testing.T) {
	for _, c := range []struct {
		name        string
		limit       int
		xcr0, bytes uint32
		amx, avx512 bool
	}{
		{"no limit", 0, 0x602e7, 11008, true, true},
		{"all of it", 11008, 0x602e7, 11008, true, true},
		{"a page", 4096, 0x2e7, 2696, false, true},
		{"AVX-512 cut in half", 1700, 0x7, 832, false, false},
		{"AVX alone", 832, 0x7, 832, false, false},
		{"nothing", 576, 0x3, 576, false, false},
	} {
		got := x86.CPUID(everything(), x86.CPU{Count: 1, XSaveBytes: c.limit})
		xstate, _ := find(got, 0xd, 0)
		if xstate.EAX != c.xcr0 || xstate.ECX != c.bytes {
			t.Errorf("%s: XCR0 %#x of %d bytes, want %#x of %d", c.name, xstate.EAX, xstate.ECX, c.xcr0, c.bytes)
		}
		seven, _ := find(got, 7, 0)
		if amx := seven.EDX>>24&1 == 1; amx != c.amx {
			t.Errorf("%s: AMX %t", c.name, amx)
		}
		if avx512 := seven.EBX>>16&1 == 1; avx512 != c.avx512 {
			t.Errorf("%s: AVX-512 %t", c.name, avx512)
		}
		one, _ := find(got, 1, 0)
		if avx := one.ECX>>28&1 == 1; avx != (c.xcr0&4 != 0) {
			t.Errorf("%s: AVX %t", c.name, avx)
		}
		if sub, _ := find(got, 0xd, 1); sub.ECX|sub.EDX != 0 {
			t.Errorf("%s: supervisor state is offered: %+v", c.name, sub)
		}
		for _, e := range got {
			if e.Function == 0xd && e.Index >= 2 && c.xcr0>>e.Index&1 == 0 {
				t.Errorf("%s: component %d is described", c.name, e.Index)
			}
		}
		if seven.EBX&(1<<25|1<<2) != 0 || seven.ECX&(1<<7) != 0 || seven.EDX&(1<<19|1<<20) != 0 {
			t.Errorf("%s: features whose state nobody saves: %+v", c.name, seven)
		}
	}
	without := everything()
	without[1].ECX &^= 1 << 26
	if _, ok := find(x86.CPUID(without, x86.CPU{Count: 1}), 0xd, 0); ok {
		t.Error("leaf 0xd without XSAVE")
	}
}

func TestTimerNeverStops(t *testing.T) {
	if six, _ := find(x86.CPUID(everything(), x86.CPU{Count: 1}), 6, 0); six.EAX&4 == 0 {
		t.Error("ARAT is off")
	}
}
