package kvm

// request is an ioctl number with the kernel's name for it, used in errors.
type request struct {
	nr   uintptr
	name string
}

// System ioctls (on /dev/kvm).
var (
	getAPIVersion     = request{0xAE00, "KVM_GET_API_VERSION"}
	createVM          = request{0xAE01, "KVM_CREATE_VM"}
	getMSRIndexList   = request{0xC004AE02, "KVM_GET_MSR_INDEX_LIST"}
	checkExtension    = request{0xAE03, "KVM_CHECK_EXTENSION"}
	getVCPUMmapSize   = request{0xAE04, "KVM_GET_VCPU_MMAP_SIZE"}
	getSupportedCPUID = request{0xC008AE05, "KVM_GET_SUPPORTED_CPUID"}
)

// VM ioctls.
var (
	createVCPU         = request{0xAE41, "KVM_CREATE_VCPU"}
	setUserMemory      = request{0x4020AE46, "KVM_SET_USER_MEMORY_REGION"}
	setTSSAddr         = request{0xAE47, "KVM_SET_TSS_ADDR"}
	setIdentityMapAddr = request{0x4008AE48, "KVM_SET_IDENTITY_MAP_ADDR"}
	createIRQChip      = request{0xAE60, "KVM_CREATE_IRQCHIP"}
	getIRQChip         = request{0xC208AE62, "KVM_GET_IRQCHIP"}
	setIRQChip         = request{0x8208AE63, "KVM_SET_IRQCHIP"}
	irqfd              = request{0x4020AE76, "KVM_IRQFD"}
	ioeventfd          = request{0x4040AE79, "KVM_IOEVENTFD"}
	setClock           = request{0x4030AE7B, "KVM_SET_CLOCK"}
	getClock           = request{0x8030AE7C, "KVM_GET_CLOCK"}
)

// vCPU ioctls.
var (
	run           = request{0xAE80, "KVM_RUN"}
	getRegs       = request{0x8090AE81, "KVM_GET_REGS"}
	setRegs       = request{0x4090AE82, "KVM_SET_REGS"}
	getSregs      = request{0x8138AE83, "KVM_GET_SREGS"}
	setSregs      = request{0x4138AE84, "KVM_SET_SREGS"}
	getMSRs       = request{0xC008AE88, "KVM_GET_MSRS"}
	setMSRs       = request{0x4008AE89, "KVM_SET_MSRS"}
	getLAPIC      = request{0x8400AE8E, "KVM_GET_LAPIC"}
	setLAPIC      = request{0x4400AE8F, "KVM_SET_LAPIC"}
	setCPUID2     = request{0x4008AE90, "KVM_SET_CPUID2"}
	getCPUID2     = request{0xC008AE91, "KVM_GET_CPUID2"}
	getMPState    = request{0x8004AE98, "KVM_GET_MP_STATE"}
	setMPState    = request{0x4004AE99, "KVM_SET_MP_STATE"}
	getVCPUEvents = request{0x8040AE9F, "KVM_GET_VCPU_EVENTS"}
	setVCPUEvents = request{0x4040AEA0, "KVM_SET_VCPU_EVENTS"}
	getDebugRegs  = request{0x8080AEA1, "KVM_GET_DEBUGREGS"}
	setDebugRegs  = request{0x4080AEA2, "KVM_SET_DEBUGREGS"}
	setTSCKHz     = request{0xAEA2, "KVM_SET_TSC_KHZ"}
	getTSCKHz     = request{0xAEA3, "KVM_GET_TSC_KHZ"}
	getXSave      = request{0x9000AEA4, "KVM_GET_XSAVE"}
	setXSave      = request{0x5000AEA5, "KVM_SET_XSAVE"}
	getXCRs       = request{0x8188AEA6, "KVM_GET_XCRS"}
	setXCRs       = request{0x4188AEA7, "KVM_SET_XCRS"}
	kvmclockCtrl  = request{0xAEAD, "KVM_KVMCLOCK_CTRL"}
	getXSave2     = request{0x9000AECF, "KVM_GET_XSAVE2"}
	setDeviceAttr = request{0x4018AEE1, "KVM_SET_DEVICE_ATTR"}
	getDeviceAttr = request{0x4018AEE2, "KVM_GET_DEVICE_ATTR"}
	hasDeviceAttr = request{0x4018AEE3, "KVM_HAS_DEVICE_ATTR"}
)

// APIVersion is the only KVM API version there has been since Linux 2.6.22.
const APIVersion = 12

// Cap is a capability number for Extension.
type Cap uintptr

// Capabilities this module asks for.
const (
	CapIRQChip          Cap = 0
	CapUserMemory       Cap = 3
	CapIRQFD            Cap = 32
	CapIOEventFD        Cap = 36
	CapXSave            Cap = 55
	CapXCRs             Cap = 56
	CapTSCControl       Cap = 60
	CapMaxVCPUs         Cap = 66
	CapTSCDeadlineTimer Cap = 72
	CapKVMClockCtrl     Cap = 76
	CapVCPUAttributes   Cap = 127
	CapImmediateExit    Cap = 136
	CapXSave2           Cap = 208
)

// ExitReason says why Run returned.
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

// Multi-processing states (KVM_GET_MP_STATE) this module names.
const (
	MPStateRunnable      uint32 = 0
	MPStateUninitialized uint32 = 1
)

// IRQ chips of KVM_GET_IRQCHIP, in the order they are saved.
const (
	IRQChipPICMaster uint32 = 0
	IRQChipPICSlave  uint32 = 1
	IRQChipIOAPIC    uint32 = 2
)

// CPUIDSignificantIndex is set in CPUIDEntry.Flags when the leaf has sub-leaves.
const CPUIDSignificantIndex uint32 = 1

// The vCPU attribute of the TSC offset (KVM_VCPU_TSC_CTRL / KVM_VCPU_TSC_OFFSET, Linux 5.16).
const (
	vcpuTSCCtrl   uint32 = 0
	vcpuTSCOffset uint64 = 0
)

// KVM_IOEVENTFD flags.
const ioeventfdDatamatch uint32 = 1
