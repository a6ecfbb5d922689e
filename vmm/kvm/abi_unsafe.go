package kvm

import "unsafe"

// Sizes and offsets of the kernel's structs, as linux/kvm.h and asm/kvm.h (6.1) give them to a C compiler on x86-64. A difference does
// not compile. That these numbers are those of the headers is the test's business.
var (
	_ [144]byte  = [unsafe.Sizeof(Regs{})]byte{}
	_ [48]byte   = [unsafe.Offsetof(Regs{}.RSP)]byte{}
	_ [128]byte  = [unsafe.Offsetof(Regs{}.RIP)]byte{}
	_ [136]byte  = [unsafe.Offsetof(Regs{}.RFlags)]byte{}
	_ [24]byte   = [unsafe.Sizeof(Segment{})]byte{}
	_ [12]byte   = [unsafe.Offsetof(Segment{}.Selector)]byte{}
	_ [14]byte   = [unsafe.Offsetof(Segment{}.Type)]byte{}
	_ [22]byte   = [unsafe.Offsetof(Segment{}.Unusable)]byte{}
	_ [16]byte   = [unsafe.Sizeof(Table{})]byte{}
	_ [8]byte    = [unsafe.Offsetof(Table{}.Limit)]byte{}
	_ [312]byte  = [unsafe.Sizeof(Sregs{})]byte{}
	_ [144]byte  = [unsafe.Offsetof(Sregs{}.TR)]byte{}
	_ [192]byte  = [unsafe.Offsetof(Sregs{}.GDT)]byte{}
	_ [224]byte  = [unsafe.Offsetof(Sregs{}.CR0)]byte{}
	_ [264]byte  = [unsafe.Offsetof(Sregs{}.EFER)]byte{}
	_ [272]byte  = [unsafe.Offsetof(Sregs{}.APICBase)]byte{}
	_ [1024]byte = [unsafe.Sizeof(LAPIC{})]byte{}
	_ [392]byte  = [unsafe.Sizeof(XCRs{})]byte{}
	_ [128]byte  = [unsafe.Sizeof(DebugRegs{})]byte{}
	_ [64]byte   = [unsafe.Sizeof(VCPUEvents{})]byte{}
	_ [520]byte  = [unsafe.Sizeof(IRQChip{})]byte{}
	_ [8]byte    = [unsafe.Offsetof(IRQChip{}.State)]byte{}
	_ [48]byte   = [unsafe.Sizeof(Clock{})]byte{}
	_ [8]byte    = [unsafe.Offsetof(Clock{}.Flags)]byte{}
	_ [16]byte   = [unsafe.Offsetof(Clock{}.Realtime)]byte{}
	_ [24]byte   = [unsafe.Offsetof(Clock{}.HostTSC)]byte{}
	_ [40]byte   = [unsafe.Sizeof(CPUIDEntry{})]byte{}
	_ [12]byte   = [unsafe.Offsetof(CPUIDEntry{}.EAX)]byte{}
	_ [16]byte   = [unsafe.Sizeof(MSR{})]byte{}
	_ [8]byte    = [unsafe.Offsetof(MSR{}.Data)]byte{}
	_ [8]byte    = [unsafe.Offsetof(cpuidTable{}.entries)]byte{}
	_ [8]byte    = [unsafe.Offsetof(msrTable{}.entries)]byte{}
	_ [4]byte    = [unsafe.Offsetof(msrList{}.indices)]byte{}
	_ [32]byte   = [unsafe.Sizeof(userMemory{})]byte{}
	_ [8]byte    = [unsafe.Offsetof(userMemory{}.guestPhys)]byte{}
	_ [24]byte   = [unsafe.Offsetof(userMemory{}.userspaceAddr)]byte{}
	_ [8]byte    = [unsafe.Sizeof(irqLevel{})]byte{}
	_ [4]byte    = [unsafe.Offsetof(irqLevel{}.level)]byte{}
	_ [64]byte   = [unsafe.Sizeof(ioeventfdArg{})]byte{}
	_ [16]byte   = [unsafe.Offsetof(ioeventfdArg{}.len)]byte{}
	_ [20]byte   = [unsafe.Offsetof(ioeventfdArg{}.fd)]byte{}
	_ [24]byte   = [unsafe.Offsetof(ioeventfdArg{}.flags)]byte{}
	_ [24]byte   = [unsafe.Sizeof(deviceAttr{})]byte{}
	_ [4]byte    = [unsafe.Offsetof(deviceAttr{}.group)]byte{}
	_ [16]byte   = [unsafe.Offsetof(deviceAttr{}.addr)]byte{}
)

// An ioctl number carries the size of its argument in bits 16-29 (asm-generic/ioctl.h): it is that of the struct passed with it.
const (
	argShift = 16
	argMask  = 1<<14 - 1
)

var (
	_ [getRegs >> argShift & argMask]byte            = [unsafe.Sizeof(Regs{})]byte{}
	_ [setRegs >> argShift & argMask]byte            = [unsafe.Sizeof(Regs{})]byte{}
	_ [getSregs >> argShift & argMask]byte           = [unsafe.Sizeof(Sregs{})]byte{}
	_ [setSregs >> argShift & argMask]byte           = [unsafe.Sizeof(Sregs{})]byte{}
	_ [getLAPIC >> argShift & argMask]byte           = [unsafe.Sizeof(LAPIC{})]byte{}
	_ [setLAPIC >> argShift & argMask]byte           = [unsafe.Sizeof(LAPIC{})]byte{}
	_ [getXCRs >> argShift & argMask]byte            = [unsafe.Sizeof(XCRs{})]byte{}
	_ [setXCRs >> argShift & argMask]byte            = [unsafe.Sizeof(XCRs{})]byte{}
	_ [getDebugRegs >> argShift & argMask]byte       = [unsafe.Sizeof(DebugRegs{})]byte{}
	_ [setDebugRegs >> argShift & argMask]byte       = [unsafe.Sizeof(DebugRegs{})]byte{}
	_ [getVCPUEvents >> argShift & argMask]byte      = [unsafe.Sizeof(VCPUEvents{})]byte{}
	_ [setVCPUEvents >> argShift & argMask]byte      = [unsafe.Sizeof(VCPUEvents{})]byte{}
	_ [getIRQChip >> argShift & argMask]byte         = [unsafe.Sizeof(IRQChip{})]byte{}
	_ [setIRQChip >> argShift & argMask]byte         = [unsafe.Sizeof(IRQChip{})]byte{}
	_ [getClock >> argShift & argMask]byte           = [unsafe.Sizeof(Clock{})]byte{}
	_ [setClock >> argShift & argMask]byte           = [unsafe.Sizeof(Clock{})]byte{}
	_ [setUserMemory >> argShift & argMask]byte      = [unsafe.Sizeof(userMemory{})]byte{}
	_ [irqLine >> argShift & argMask]byte            = [unsafe.Sizeof(irqLevel{})]byte{}
	_ [ioeventfd >> argShift & argMask]byte          = [unsafe.Sizeof(ioeventfdArg{})]byte{}
	_ [setDeviceAttr >> argShift & argMask]byte      = [unsafe.Sizeof(deviceAttr{})]byte{}
	_ [getDeviceAttr >> argShift & argMask]byte      = [unsafe.Sizeof(deviceAttr{})]byte{}
	_ [getXSave >> argShift & argMask]byte           = [xsaveBytes]byte{}
	_ [setXSave >> argShift & argMask]byte           = [xsaveBytes]byte{}
	_ [getXSave2 >> argShift & argMask]byte          = [xsaveBytes]byte{}
	_ [getMPState >> argShift & argMask]byte         = [unsafe.Sizeof(uint32(0))]byte{}
	_ [setMPState >> argShift & argMask]byte         = [unsafe.Sizeof(uint32(0))]byte{}
	_ [setIdentityMapAddr >> argShift & argMask]byte = [unsafe.Sizeof(uint64(0))]byte{}
	// Of a table only the header counts.
	_ [getSupportedCPUID >> argShift & argMask]byte = [unsafe.Offsetof(cpuidTable{}.entries)]byte{}
	_ [getCPUID2 >> argShift & argMask]byte         = [unsafe.Offsetof(cpuidTable{}.entries)]byte{}
	_ [setCPUID2 >> argShift & argMask]byte         = [unsafe.Offsetof(cpuidTable{}.entries)]byte{}
	_ [getMSRs >> argShift & argMask]byte           = [unsafe.Offsetof(msrTable{}.entries)]byte{}
	_ [setMSRs >> argShift & argMask]byte           = [unsafe.Offsetof(msrTable{}.entries)]byte{}
	_ [getMSRIndexList >> argShift & argMask]byte   = [unsafe.Offsetof(msrList{}.indices)]byte{}
)
