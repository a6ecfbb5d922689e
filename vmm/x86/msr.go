package x86

import "torpor/vmm/kvm"

// MSRs this module names.
const (
	MSRTSC         = 0x10
	MSRTSCDeadline = 0x6e0

	msrSysenterCS   = 0x174
	msrSysenterESP  = 0x175
	msrSysenterEIP  = 0x176
	msrMiscEnable   = 0x1a0
	msrMTRRDefType  = 0x2ff
	msrSTAR         = 0xc0000081
	msrLSTAR        = 0xc0000082
	msrCSTAR        = 0xc0000083
	msrSFMask       = 0xc0000084
	msrKernelGSBase = 0xc0000102

	miscFastString  = 1
	mtrrWriteBackEn = 0x806 // enabled, default type write-back
)

// BootMSRs returns the MSRs of a CPU at kernel entry.
func BootMSRs() []kvm.MSR {
	var out []kvm.MSR
	for _, index := range []uint32{
		msrSysenterCS, msrSysenterESP, msrSysenterEIP, msrSTAR, msrCSTAR, msrKernelGSBase, msrSFMask, msrLSTAR, MSRTSC,
	} {
		out = append(out, kvm.MSR{Index: index})
	}
	return append(out,
		kvm.MSR{Index: msrMiscEnable, Data: miscFastString},
		kvm.MSR{Index: msrMTRRDefType, Data: mtrrWriteBackEn})
}

// savedMSRs are the MSRs that are guest state, as inclusive ranges. What KVM lists beyond them is either derived (MCG_CTL, VMX
// capabilities), of interfaces never offered to our guests (Hyper-V), or host information.
var savedMSRs = []struct{ first, last uint32 }{
	{0x10, 0x10},             // TSC
	{0x1b, 0x1b},             // APIC_BASE
	{0x34, 0x34},             // SMI_COUNT
	{0x3a, 0x3b},             // FEATURE_CONTROL, TSC_ADJUST
	{0x48, 0x48},             // SPEC_CTRL
	{0x8b, 0x8b},             // microcode revision
	{0x9e, 0x9e},             // SMBASE
	{0xce, 0xce},             // PLATFORM_INFO
	{0xe7, 0xe8},             // MPERF, APERF
	{0xfe, 0xfe},             // MTRRcap
	{0x122, 0x122},           // TSX_CTRL
	{0x140, 0x140},           // MISC_FEATURES_ENABLES
	{0x174, 0x176},           // SYSENTER
	{0x179, 0x17a},           // MCG_CAP, MCG_STATUS
	{0x1a0, 0x1a0},           // MISC_ENABLE
	{0x1c4, 0x1c5},           // XFD, XFD_ERR
	{0x1d9, 0x1d9},           // DEBUGCTL
	{0x1fc, 0x1fc},           // POWER_CTL
	{0x200, 0x2ff},           // MTRRs, PAT
	{0x400, 0x47f},           // machine-check banks
	{0x6e0, 0x6e0},           // TSC_DEADLINE
	{0xda0, 0xda0},           // XSS
	{0x4b564d00, 0x4b564dff}, // KVM's own: wall clock, system time, steal time, EOI, poll control
	{0xc0000080, 0xc0000084}, // EFER, STAR, LSTAR, CSTAR, SFMASK
	{0xc0000100, 0xc0000103}, // FS, GS, KERNEL_GS bases, TSC_AUX
	{0xc0000104, 0xc0000104}, // AMD TSC ratio
	{0xc0010000, 0xc0010007}, // AMD performance counters, the four of K7
	{0xc0010015, 0xc0010015}, // HWCR
	{0xc0010200, 0xc001020b}, // AMD performance counters, the six of family 15h
	{0xc001011f, 0xc001011f}, // VIRT_SPEC_CTRL
}

// SavedMSRs returns which of the MSRs KVM can save (KVM_GET_MSR_INDEX_LIST) are part of a snapshot, in the order given.
func SavedMSRs(supported []uint32) []uint32 {
	var out []uint32
	for _, index := range supported {
		for _, r := range savedMSRs {
			if r.first <= index && index <= r.last {
				out = append(out, index)
				break
			}
		}
	}
	return out
}

// RestoreOrder splits saved MSRs into two steps. The TSC deadline is compared with the TSC the moment it is written, so it
// comes last; a deadline that was saved as 0 had just fired and waited to be delivered (KVM clears it then, but the interrupt
// may not have reached the local APIC page yet), so it is set to the saved TSC: a timer that fires at once, never one lost.
func RestoreOrder(msrs []kvm.MSR) (first, last []kvm.MSR) {
	var tsc uint64
	for _, m := range msrs {
		if m.Index == MSRTSC {
			tsc = m.Data
		}
	}
	for _, m := range msrs {
		if m.Index != MSRTSCDeadline {
			first = append(first, m)
			continue
		}
		if m.Data == 0 {
			m.Data = tsc
		}
		last = append(last, m)
	}
	return first, last
}
