package x86_test

import (
	"bytes"
	"encoding/binary"
	"testing"

	"torpor/vmm/kvm"
	"torpor/vmm/x86"
)

type e820 struct {
	addr, size uint64
	kind       uint32
}

func e820Of(zeroPage []byte) (out []e820) {
	for i := range int(zeroPage[0x1e8]) {
		e := zeroPage[0x2d0+20*i:]
		out = append(out, e820{binary.LittleEndian.Uint64(e), binary.LittleEndian.Uint64(e[8:]), binary.LittleEndian.Uint32(e[16:])})
	}
	return out
}

func TestMemoryMapLeavesTheHoleAndLosesNothing(t *testing.T) {
	for _, size := range []uint64{128 << 20, 512 << 20, 3 << 30, 3<<30 + 2<<20, 4 << 30, 16 << 30} {
		p := x86.ZeroPage(x86.BootParams{Memory: size})
		var ram, end uint64
		for _, e := range e820Of(p) {
			if e.addr < end {
				t.Errorf("%d bytes: entry at %#x overlaps or is out of order", size, e.addr)
			}
			if end = e.addr + e.size; e.kind == 1 {
				ram += e.size
				if e.addr < x86.HoleEnd && end > x86.HoleAddr {
					t.Errorf("%d bytes: RAM reaches into the hole: %#x-%#x", size, e.addr, end)
				}
			}
		}
		if want := size - (x86.HighRAMAddr - x86.LowRAMEnd); ram != want {
			t.Errorf("%d bytes: %d of RAM in the map, want %d", size, ram, want)
		}
	}
}

func TestZeroPageFields(t *testing.T) {
	p := x86.ZeroPage(x86.BootParams{
		Memory: 512 << 20, Initrd: x86.Range{Addr: 0x1f000000, Size: 0x123456}, RSDP: 0xe0000, SetupData: 0x6000,
	})
	le := binary.LittleEndian
	for _, f := range []struct {
		name      string
		got, want uint64
	}{
		{"acpi_rsdp_addr", le.Uint64(p[0x70:]), 0xe0000},
		{"boot_flag", uint64(le.Uint16(p[0x1fe:])), 0xaa55},
		{"header", uint64(le.Uint32(p[0x202:])), 0x53726448},
		{"type_of_loader", uint64(p[0x210]), 0xff},
		{"ramdisk_image", uint64(le.Uint32(p[0x218:])), 0x1f000000},
		{"ramdisk_size", uint64(le.Uint32(p[0x21c:])), 0x123456},
		{"cmd_line_ptr", uint64(le.Uint32(p[0x228:])), x86.CmdlineAddr},
		{"setup_data", le.Uint64(p[0x250:]), 0x6000},
		{"sentinel", uint64(p[0x1ef]), 0},
	} {
		if f.got != f.want {
			t.Errorf("%s is %#x, want %#x", f.name, f.got, f.want)
		}
	}
	node := x86.RNGSeed(bytes.Repeat([]byte{7}, 64))
	if le.Uint64(node) != 0 || le.Uint32(node[8:]) != 9 || le.Uint32(node[12:]) != 64 || len(node) != 80 {
		t.Errorf("seed node % x", node[:16])
	}
}

// Nothing that is placed low may overlap anything else.
func TestLowMemoryLayoutIsDisjoint(t *testing.T) {
	parts := []struct {
		name       string
		start, end uint64
	}{
		{"GDT", x86.GDTAddr, x86.GDTAddr + uint64(len(x86.GDT()))},
		{"setup data", x86.SetupDataAddr, x86.SetupDataAddr + uint64(len(x86.RNGSeed(make([]byte, x86.RNGSeedBytes))))},
		{"zero page", x86.ZeroPageAddr, x86.ZeroPageAddr + 4096},
		{"stack", x86.ZeroPageAddr + 4096, x86.StackAddr},
		{"page tables", x86.PML4Addr, x86.PML4Addr + uint64(len(x86.PageTables()))},
		{"command line", x86.CmdlineAddr, x86.CmdlineAddr + x86.MaxCmdline + 1},
		{"end of low RAM", x86.LowRAMEnd, x86.ACPIAddr},
	}
	for i := 1; i < len(parts); i++ {
		if parts[i].start < parts[i-1].end {
			t.Errorf("%s at %#x overlaps %s, which ends at %#x", parts[i].name, parts[i].start, parts[i-1].name, parts[i-1].end)
		}
	}
}

// host is a CPUID table with everything in it that must be changed.
func host() []kvm.CPUIDEntry {
	all := ^uint32(0)
	return []kvm.CPUIDEntry{
		{Function: 0, EAX: 0x1f},
		{Function: 1, EBX: 0x05080800, ECX: all, EDX: all},
		{Function: 4, Index: 0, EAX: 0x21 | 0xfff<<14},
		{Function: 4, Index: 3, EAX: 0x63},
		{Function: 0xa, EAX: all, EDX: all},
		{Function: 0xb, Index: 0, EAX: 9, EDX: 77},
		{Function: 0x1f, Index: 0, EAX: 9, EDX: 77},
		{Function: 0x40000001, EAX: all},
		{Function: 0x80000001, ECX: all, EDX: all},
		{Function: 0x80000008, EAX: 0x3030, ECX: 0x7f},
		{Function: 0x8000000a, EAX: all},
		{Function: 0x80000022, EAX: all},
		{Function: 0x8000001d, Index: 3, EAX: 0x63},
		{Function: 0x8000001e, EAX: 5, EBX: 5, ECX: 5},
	}
}

func find(entries []kvm.CPUIDEntry, leaf, index uint32) (kvm.CPUIDEntry, bool) {
	for _, e := range entries {
		if e.Function == leaf && e.Index == index {
			return e, true
		}
	}
	return kvm.CPUIDEntry{}, false
}

func TestCPUIDPlacesEachCPU(t *testing.T) {
	for count := 1; count <= x86.MaxVCPUs; count++ {
		for id := range count {
			got := x86.CPUID(host(), x86.CPU{ID: id, Count: count, TSCDeadline: true})
			one, _ := find(got, 1, 0)
			if one.EBX>>24 != uint32(id) || one.EBX>>16&0xff != uint32(count) || (one.EDX>>28&1 == 1) != (count > 1) {
				t.Errorf("CPU %d of %d: leaf 1 EBX %#x EDX %#x", id, count, one.EBX, one.EDX)
			}
			for _, leaf := range []uint32{0xb, 0x1f} {
				smt, _ := find(got, leaf, 0)
				core, _ := find(got, leaf, 1)
				if smt.EDX != uint32(id) || core.EDX != uint32(id) || core.EBX != uint32(count) || smt.EBX != 1 {
					t.Errorf("CPU %d of %d: leaf %#x %+v %+v", id, count, leaf, smt, core)
				}
				if 1<<core.EAX < count || core.ECX != 0x201 || smt.ECX != 0x100 {
					t.Errorf("CPU %d of %d: core level of leaf %#x %+v", id, count, leaf, core)
				}
			}
			if l3, _ := find(got, 4, 3); l3.EAX>>14&0xfff != uint32(count-1) || l3.EAX>>26 != uint32(count-1) {
				t.Errorf("CPU %d of %d: L3 %#x", id, count, l3.EAX)
			}
			if l1, _ := find(got, 4, 0); l1.EAX>>14&0xfff != 0 {
				t.Errorf("L1 is shared: %#x", l1.EAX)
			}
		}
	}
}

func TestCPUIDMasksWhatASnapshotCannotCarry(t *testing.T) {
	got := x86.CPUID(host(), x86.CPU{Count: 2})
	one, _ := find(got, 1, 0)
	if one.ECX&(1<<5|1<<24|1<<27) != 0 || one.ECX>>31 != 1 {
		t.Errorf("leaf 1 ECX %#x: VMX, deadline timer and OSXSAVE must be off, hypervisor on", one.ECX)
	}
	if k, _ := find(got, 0x40000001, 0); k.EAX&(1<<4|1<<10|1<<14) != 0 || k.EAX == 0 {
		t.Errorf("KVM features %#x: asynchronous page faults are on", k.EAX)
	}
	if ext, _ := find(got, 0x80000001, 0); ext.ECX&(1<<2|1<<23) != 0 {
		t.Errorf("leaf 0x80000001 ECX %#x: SVM or performance counters are on", ext.ECX)
	}
	if pmu, _ := find(got, 0xa, 0); pmu.EAX != 0 {
		t.Errorf("leaf 0xa EAX %#x", pmu.EAX)
	}
	for _, leaf := range []uint32{0x8000000a, 0x80000022} {
		if _, ok := find(got, leaf, 0); ok {
			t.Errorf("leaf %#x is there", leaf)
		}
	}
	with, _ := find(x86.CPUID(host(), x86.CPU{Count: 1, TSCDeadline: true}), 1, 0)
	if with.ECX>>24&1 != 1 {
		t.Error("TSC deadline timer is off")
	}
}

// A deadline restored before the TSC, or saved as 0 while it was due, is a timer lost (Firecracker had both).
func TestDeadlineIsRestoredLastAndNeverLost(t *testing.T) {
	first, last := x86.RestoreOrder([]kvm.MSR{{Index: x86.MSRTSCDeadline, Data: 0}, {Index: x86.MSRTSC, Data: 1234}, {Index: 0x1a0, Data: 1}})
	if len(first) != 2 || len(last) != 1 || last[0].Index != x86.MSRTSCDeadline || last[0].Data != 1234 {
		t.Errorf("first %+v, last %+v", first, last)
	}
	_, last = x86.RestoreOrder([]kvm.MSR{{Index: x86.MSRTSC, Data: 1}, {Index: x86.MSRTSCDeadline, Data: 99}})
	if last[0].Data != 99 {
		t.Errorf("deadline %d, want 99", last[0].Data)
	}
}

func TestSavedMSRs(t *testing.T) {
	got := x86.SavedMSRs([]uint32{0x10, 0x17b, 0x480, 0x6e0, 0x40000000, 0x4b564d01, 0xc0000102})
	want := []uint32{0x10, 0x6e0, 0x4b564d01, 0xc0000102}
	if len(got) != len(want) {
		t.Fatalf("%#x", got)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("%#x, want %#x", got[i], want[i])
		}
	}
}

func TestSetLINT(t *testing.T) {
	var l kvm.LAPIC
	binary.LittleEndian.PutUint32(l[0x350:], 0x10000) // masked, as after reset
	x86.SetLINT(&l)
	if a, b := binary.LittleEndian.Uint32(l[0x350:]), binary.LittleEndian.Uint32(l[0x360:]); a != 0x10700 || b != 0x400 {
		t.Errorf("LINT0 %#x LINT1 %#x", a, b)
	}
}
