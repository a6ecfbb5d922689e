package kvm

import (
	"maps"
	"slices"
)

// request is an ioctl number of linux/kvm.h: direction, size of the argument, the type 0xAE, and a number (asm-generic/ioctl.h). Its
// String is the kernel's name, which is also the heading under which Documentation/virt/kvm/api.rst describes it.
type request uintptr

func (r request) String() string { return requestNames[r] }

// Ioctls of the system (/dev/kvm), with their argument.
const (
	getAPIVersion     request = 0xAE00     // none; answers APIVersion
	createVM          request = 0xAE01     // machine type, 0
	getMSRIndexList   request = 0xC004AE02 // struct kvm_msr_list
	checkExtension    request = 0xAE03     // a Cap; of the system and of a VM
	getVCPUMmapSize   request = 0xAE04     // none; answers the size of kvm_run, in bytes
	getSupportedCPUID request = 0xC008AE05 // struct kvm_cpuid2
)

// Ioctls of a VM.
const (
	createVCPU         request = 0xAE41     // vCPU id
	setUserMemory      request = 0x4020AE46 // struct kvm_userspace_memory_region
	setTSSAddr         request = 0xAE47     // guest-physical address
	setIdentityMapAddr request = 0x4008AE48 // guest-physical address, by pointer
	createIRQChip      request = 0xAE60     // none
	irqLine            request = 0x4008AE61 // struct kvm_irq_level
	getIRQChip         request = 0xC208AE62 // struct kvm_irqchip
	setIRQChip         request = 0x8208AE63 // struct kvm_irqchip
	ioeventfd          request = 0x4040AE79 // struct kvm_ioeventfd
	setClock           request = 0x4030AE7B // struct kvm_clock_data
	getClock           request = 0x8030AE7C // struct kvm_clock_data
)

// Ioctls of a vCPU.
const (
	run           request = 0xAE80     // none
	getRegs       request = 0x8090AE81 // struct kvm_regs
	setRegs       request = 0x4090AE82 // struct kvm_regs
	getSregs      request = 0x8138AE83 // struct kvm_sregs
	setSregs      request = 0x4138AE84 // struct kvm_sregs
	getMSRs       request = 0xC008AE88 // struct kvm_msrs; answers how many
	setMSRs       request = 0x4008AE89 // struct kvm_msrs; answers how many
	getLAPIC      request = 0x8400AE8E // struct kvm_lapic_state
	setLAPIC      request = 0x4400AE8F // struct kvm_lapic_state
	setCPUID2     request = 0x4008AE90 // struct kvm_cpuid2
	getCPUID2     request = 0xC008AE91 // struct kvm_cpuid2
	getMPState    request = 0x8004AE98 // struct kvm_mp_state
	setMPState    request = 0x4004AE99 // struct kvm_mp_state
	getVCPUEvents request = 0x8040AE9F // struct kvm_vcpu_events
	setVCPUEvents request = 0x4040AEA0 // struct kvm_vcpu_events
	getDebugRegs  request = 0x8080AEA1 // struct kvm_debugregs
	setDebugRegs  request = 0x4080AEA2 // struct kvm_debugregs
	setTSCKHz     request = 0xAEA2     // kHz
	getTSCKHz     request = 0xAEA3     // none; answers kHz
	getXSave      request = 0x9000AEA4 // struct kvm_xsave
	setXSave      request = 0x5000AEA5 // struct kvm_xsave, as long as CapXSave2 says
	getXCRs       request = 0x8188AEA6 // struct kvm_xcrs
	setXCRs       request = 0x4188AEA7 // struct kvm_xcrs
	kvmclockCtrl  request = 0xAEAD     // none
	getXSave2     request = 0x9000AECF // struct kvm_xsave, as long as CapXSave2 says
	setDeviceAttr request = 0x4018AEE1 // struct kvm_device_attr
	getDeviceAttr request = 0x4018AEE2 // struct kvm_device_attr
)

var requestNames = map[request]string{
	getAPIVersion:      "KVM_GET_API_VERSION",
	createVM:           "KVM_CREATE_VM",
	getMSRIndexList:    "KVM_GET_MSR_INDEX_LIST",
	checkExtension:     "KVM_CHECK_EXTENSION",
	getVCPUMmapSize:    "KVM_GET_VCPU_MMAP_SIZE",
	getSupportedCPUID:  "KVM_GET_SUPPORTED_CPUID",
	createVCPU:         "KVM_CREATE_VCPU",
	setUserMemory:      "KVM_SET_USER_MEMORY_REGION",
	setTSSAddr:         "KVM_SET_TSS_ADDR",
	setIdentityMapAddr: "KVM_SET_IDENTITY_MAP_ADDR",
	createIRQChip:      "KVM_CREATE_IRQCHIP",
	irqLine:            "KVM_IRQ_LINE",
	getIRQChip:         "KVM_GET_IRQCHIP",
	setIRQChip:         "KVM_SET_IRQCHIP",
	ioeventfd:          "KVM_IOEVENTFD",
	setClock:           "KVM_SET_CLOCK",
	getClock:           "KVM_GET_CLOCK",
	run:                "KVM_RUN",
	getRegs:            "KVM_GET_REGS",
	setRegs:            "KVM_SET_REGS",
	getSregs:           "KVM_GET_SREGS",
	setSregs:           "KVM_SET_SREGS",
	getMSRs:            "KVM_GET_MSRS",
	setMSRs:            "KVM_SET_MSRS",
	getLAPIC:           "KVM_GET_LAPIC",
	setLAPIC:           "KVM_SET_LAPIC",
	setCPUID2:          "KVM_SET_CPUID2",
	getCPUID2:          "KVM_GET_CPUID2",
	getMPState:         "KVM_GET_MP_STATE",
	setMPState:         "KVM_SET_MP_STATE",
	getVCPUEvents:      "KVM_GET_VCPU_EVENTS",
	setVCPUEvents:      "KVM_SET_VCPU_EVENTS",
	getDebugRegs:       "KVM_GET_DEBUGREGS",
	setDebugRegs:       "KVM_SET_DEBUGREGS",
	setTSCKHz:          "KVM_SET_TSC_KHZ",
	getTSCKHz:          "KVM_GET_TSC_KHZ",
	getXSave:           "KVM_GET_XSAVE",
	setXSave:           "KVM_SET_XSAVE",
	getXCRs:            "KVM_GET_XCRS",
	setXCRs:            "KVM_SET_XCRS",
	kvmclockCtrl:       "KVM_KVMCLOCK_CTRL",
	getXSave2:          "KVM_GET_XSAVE2",
	setDeviceAttr:      "KVM_SET_DEVICE_ATTR",
	getDeviceAttr:      "KVM_GET_DEVICE_ATTR",
}

// Requests returns the number of every ioctl that this package issues: what a filter of system calls must let through. The one that
// is made most comes first.
func Requests() []uint32 {
	numbers := []uint32{uint32(run)}
	for _, r := range slices.Sorted(maps.Keys(requestNames)) {
		if r != run {
			numbers = append(numbers, uint32(r))
		}
	}
	return numbers
}

// APIVersion is the only KVM API version there has been since Linux 2.6.22.
const APIVersion = 12

// Cap is a capability number for Extension (KVM_CAP_*, linux/kvm.h).
type Cap uintptr

// Capabilities this module asks for. The answer of Extension is 1 or 0 unless said.
const (
	CapIRQChip          Cap = 0
	CapUserMemory       Cap = 3
	CapIOEventFD        Cap = 36
	CapXSave            Cap = 55
	CapXCRs             Cap = 56
	CapTSCControl       Cap = 60 // the guest's TSC can tick at another rate than the host's
	CapMaxVCPUs         Cap = 66 // the most vCPUs a VM can have
	CapTSCDeadlineTimer Cap = 72
	CapKVMClockCtrl     Cap = 76
	CapVCPUAttributes   Cap = 127
	CapImmediateExit    Cap = 136
	CapXSave2           Cap = 208 // bytes of a vCPU's extended state; 0 before Linux 5.17
)

// ExitReason says why Run returned (KVM_EXIT_*, linux/kvm.h).
type ExitReason uint32

// Exit reasons the machine knows how to treat.
const (
	ExitUnknown       ExitReason = 0
	ExitIO            ExitReason = 2
	ExitHLT           ExitReason = 5
	ExitMMIO          ExitReason = 6
	ExitShutdown      ExitReason = 8
	ExitFailEntry     ExitReason = 9
	ExitIntr          ExitReason = 10
	ExitInternalError ExitReason = 17
	ExitSystemEvent   ExitReason = 24
)

// Multi-processing states (KVM_MP_STATE_*, linux/kvm.h) this module names.
const (
	MPStateRunnable      uint32 = 0
	MPStateUninitialized uint32 = 1
)

// IRQ chips of KVM_GET_IRQCHIP (KVM_IRQCHIP_*, asm/kvm.h), in the order they are saved.
const (
	IRQChipPICMaster uint32 = 0
	IRQChipPICSlave  uint32 = 1
	IRQChipIOAPIC    uint32 = 2
)

// CPUIDSignificantIndex is set in CPUIDEntry.Flags when the leaf has sub-leaves (KVM_CPUID_FLAG_SIGNIFCANT_INDEX, asm/kvm.h).
const CPUIDSignificantIndex uint32 = 1

// The vCPU attribute of the TSC offset (KVM_VCPU_TSC_CTRL and KVM_VCPU_TSC_OFFSET, asm/kvm.h, Linux 5.16).
const (
	vcpuTSCCtrl   uint32 = 0
	vcpuTSCOffset uint64 = 0
)

// ioeventfdDatamatch makes KVM_IOEVENTFD signal only writes of one value (KVM_IOEVENTFD_FLAG_DATAMATCH, linux/kvm.h).
const ioeventfdDatamatch uint32 = 1
