package snapshot

import (
	"fmt"
	"slices"
	"strings"
)

// CPU is what a guest was told its CPU can do. A guest that found a feature at boot uses it for ever, so a machine that takes
// the snapshot must have every one.
type CPU struct {
	Vendor     string
	XSaveBytes uint32 // size of the extended state area
	Features   []Features
	Template   string // the CPU template that chose the features; "": none, all the host had
}

// Register names one of the four results of CPUID.
type Register uint8

// The registers of CPUID.
const (
	EAX Register = iota
	EBX
	ECX
	EDX
)

func (r Register) String() string { return [...]string{"EAX", "EBX", "ECX", "EDX"}[r&3] }

// Features is one CPUID result whose bits are features.
type Features struct {
	Leaf, Index uint32
	Register    Register
	Bits        uint32
}

// FeatureWords lists the CPUID results whose bits are features and must not get lost (SDM volume 2A, APM volume 3, and the
// kernel's cpuid.rst for 0x40000001). Bits is zero in them.
func FeatureWords() []Features {
	return []Features{
		{Leaf: 0x1, Register: ECX},
		{Leaf: 0x1, Register: EDX},
		{Leaf: 0x6, Register: EAX},
		{Leaf: 0x7, Register: EBX},
		{Leaf: 0x7, Register: ECX},
		{Leaf: 0x7, Register: EDX},
		{Leaf: 0x7, Index: 1, Register: EAX},
		{Leaf: 0x7, Index: 1, Register: EDX},
		{Leaf: 0x7, Index: 2, Register: EDX},
		{Leaf: 0xd, Register: EAX},
		{Leaf: 0xd, Register: EDX},
		{Leaf: 0xd, Index: 1, Register: EAX},
		{Leaf: 0xd, Index: 1, Register: ECX},
		{Leaf: 0x80000001, Register: ECX},
		{Leaf: 0x80000001, Register: EDX},
		{Leaf: 0x80000007, Register: EDX},
		{Leaf: 0x80000008, Register: EBX},
		{Leaf: 0x80000021, Register: EAX},
		{Leaf: 0x40000001, Register: EAX},
	}
}

// Missing names what the saved CPU c has and host lacks: an empty result means that host can run the snapshot.
func (c CPU) Missing(host CPU) []string {
	var out []string
	if c.Vendor != host.Vendor {
		out = append(out, fmt.Sprintf("vendor %s (this CPU is %s)", c.Vendor, host.Vendor))
	}
	if c.XSaveBytes > host.XSaveBytes {
		out = append(out, fmt.Sprintf("%d bytes of extended state (this host has %d)", c.XSaveBytes, host.XSaveBytes))
	}
	for _, f := range c.Features {
		missing := f.Bits &^ host.bits(f)
		for bit := range 32 {
			if missing>>bit&1 == 1 {
				out = append(out, f.name(bit))
			}
		}
	}
	return out
}

// Within is c without the features that host lacks.
func (c CPU) Within(host CPU) CPU {
	features := slices.Clone(c.Features)
	for i, f := range features {
		features[i].Bits &= host.bits(f)
	}
	c.Features = features
	return c
}

func (c CPU) bits(word Features) uint32 {
	for _, f := range c.Features {
		if f.Leaf == word.Leaf && f.Index == word.Index && f.Register == word.Register {
			return f.Bits
		}
	}
	return 0
}

// name is the Linux flag of a feature bit where it is well known, and its place in CPUID otherwise.
func (f Features) name(bit int) string {
	names := strings.Fields(featureNames[[3]uint32{f.Leaf, f.Index, uint32(f.Register)}])
	if bit < len(names) && names[bit] != "-" {
		return names[bit]
	}
	return fmt.Sprintf("CPUID.%XH.%d:%v[%d]", f.Leaf, f.Index, f.Register, bit)
}

// featureNames has the names of the bits of a word from bit 0 on, as in Linux's cpufeatures.h; "-" where there is none.
var featureNames = map[[3]uint32]string{
	{0x1, 0, uint32(ECX)}: "sse3 pclmulqdq dtes64 monitor ds_cpl vmx smx est tm2 ssse3 cid sdbg fma cx16 xtpr pdcm - pcid dca " +
		"sse4_1 sse4_2 x2apic movbe popcnt tsc_deadline_timer aes xsave osxsave avx f16c rdrand hypervisor",
	{0x1, 0, uint32(EDX)}: "fpu vme de pse tsc msr pae mce cx8 apic - sep mtrr pge mca cmov pat pse36 pn clflush - dts acpi " +
		"mmx fxsr sse sse2 ss ht tm ia64 pbe",
	{0x7, 0, uint32(EBX)}: "fsgsbase tsc_adjust sgx bmi1 hle avx2 fdp_excptn_only smep bmi2 erms invpcid rtm cqm - mpx rdt_a " +
		"avx512f avx512dq rdseed adx smap avx512ifma - clflushopt clwb intel_pt avx512pf avx512er avx512cd sha_ni avx512bw avx512vl",
	{0x7, 0, uint32(ECX)}: "prefetchwt1 avx512vbmi umip pku ospke waitpkg avx512_vbmi2 - gfni vaes vpclmulqdq avx512_vnni " +
		"avx512_bitalg tme avx512_vpopcntdq - la57",
	{0x7, 0, uint32(EDX)}: "- - avx512_4vnniw avx512_4fmaps fsrm - - - avx512_vp2intersect srbds_ctrl md_clear rtm_always_abort - " +
		"tsx_force_abort serialize hybrid_cpu tsxldtrk - pconfig arch_lbr ibt - amx_bf16 avx512_fp16 amx_tile amx_int8 spec_ctrl " +
		"intel_stibp flush_l1d arch_capabilities core_capabilities spec_ctrl_ssbd",
	{0x80000001, 0, uint32(ECX)}: "lahf_lm cmp_legacy svm extapic cr8_legacy abm sse4a misalignsse 3dnowprefetch osvw ibs xop " +
		"skinit wdt - lwp fma4 tce - nodeid_msr - tbm topoext",
	{0x80000001, 0, uint32(EDX)}: "fpu vme de pse tsc msr pae mce cx8 apic - syscall mtrr pge mca cmov pat pse36 - mp nx - " +
		"mmxext mmx fxsr fxsr_opt pdpe1gb rdtscp - lm 3dnowext 3dnow",
	{0xd, 0, uint32(EAX)}: "x87-state sse-state avx-state bndregs-state bndcsr-state opmask-state zmm_hi256-state " +
		"hi16_zmm-state pt-state pkru-state",
	{0x40000001, 0, uint32(EAX)}: "kvm_clocksource kvm_nop_io_delay kvm_mmu_op kvm_clocksource2 kvm_async_pf kvm_steal_time " +
		"kvm_pv_eoi kvm_pv_unhalt - kvm_pv_tlb_flush kvm_async_pf_vmexit kvm_pv_send_ipi kvm_poll_control kvm_pv_sched_yield " +
		"kvm_async_pf_int kvm_msi_ext_dest_id",
}
