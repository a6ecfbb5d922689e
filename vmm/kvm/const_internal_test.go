package kvm

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

var numbers = map[string]uint64{
	"KVM_CAP_IRQCHIP": uint64(CapIRQChip), "KVM_CAP_USER_MEMORY": uint64(CapUserMemory),
	"KVM_CAP_IOEVENTFD": uint64(CapIOEventFD), "KVM_CAP_XSAVE": uint64(CapXSave), "KVM_CAP_XCRS": uint64(CapXCRs),
	"KVM_CAP_TSC_CONTROL": uint64(CapTSCControl), "KVM_CAP_MAX_VCPUS": uint64(CapMaxVCPUs),
	"KVM_CAP_TSC_DEADLINE_TIMER": uint64(CapTSCDeadlineTimer), "KVM_CAP_KVMCLOCK_CTRL": uint64(CapKVMClockCtrl),
	"KVM_CAP_VCPU_ATTRIBUTES": uint64(CapVCPUAttributes), "KVM_CAP_IMMEDIATE_EXIT": uint64(CapImmediateExit),
	"KVM_CAP_XSAVE2": uint64(CapXSave2),
	"KVM_EXIT_IO":    uint64(ExitIO), "KVM_EXIT_HLT": uint64(ExitHLT), "KVM_EXIT_MMIO": uint64(ExitMMIO),
	"KVM_EXIT_SHUTDOWN": uint64(ExitShutdown), "KVM_EXIT_FAIL_ENTRY": uint64(ExitFailEntry), "KVM_EXIT_INTR": uint64(ExitIntr),
	"KVM_EXIT_INTERNAL_ERROR": uint64(ExitInternalError), "KVM_EXIT_SYSTEM_EVENT": uint64(ExitSystemEvent),
	"KVM_MP_STATE_RUNNABLE": uint64(MPStateRunnable), "KVM_MP_STATE_UNINITIALIZED": uint64(MPStateUninitialized),
	"KVM_IRQCHIP_IOAPIC": uint64(IRQChipIOAPIC), "KVM_CPUID_FLAG_SIGNIFCANT_INDEX": uint64(CPUIDSignificantIndex),
	"KVM_VCPU_TSC_CTRL": uint64(vcpuTSCCtrl), "KVM_VCPU_TSC_OFFSET": vcpuTSCOffset,
	"KVM_IOEVENTFD_FLAG_DATAMATCH": uint64(ioeventfdDatamatch), "KVM_API_VERSION": APIVersion,
	"sizeof(struct kvm_run)":                                       minRunBytes,
	"offsetof(struct kvm_run, exit_reason)":                        runExitReason,
	"offsetof(struct kvm_run, immediate_exit)":                     runImmediateExit,
	"offsetof(struct kvm_run, io.direction)":                       runIODirection,
	"offsetof(struct kvm_run, io.size)":                            runIOSize,
	"offsetof(struct kvm_run, io.port)":                            runIOPort,
	"offsetof(struct kvm_run, io.count)":                           runIOCount,
	"offsetof(struct kvm_run, io.data_offset)":                     runIODataOffset,
	"offsetof(struct kvm_run, mmio.phys_addr)":                     runMMIOAddr,
	"offsetof(struct kvm_run, mmio.data)":                          runMMIOData,
	"offsetof(struct kvm_run, mmio.len)":                           runMMIOLen,
	"offsetof(struct kvm_run, mmio.is_write)":                      runMMIOIsWrite,
	"offsetof(struct kvm_run, internal.suberror)":                  runUnion,
	"offsetof(struct kvm_clock_data, flags)":                       8,
	"offsetof(struct kvm_ioeventfd, fd)":                           20,
	"offsetof(struct kvm_irq_level, level)":                        4,
	"offsetof(struct kvm_sregs, apic_base)":                        272,
	"offsetof(struct kvm_userspace_memory_region, userspace_addr)": 24,

	// What abi_unsafe.go pins the Go structs to.
	"sizeof(struct kvm_regs)":                                       144,
	"offsetof(struct kvm_regs, rsp)":                                48,
	"offsetof(struct kvm_regs, rip)":                                128,
	"offsetof(struct kvm_regs, rflags)":                             136,
	"sizeof(struct kvm_segment)":                                    24,
	"offsetof(struct kvm_segment, selector)":                        12,
	"offsetof(struct kvm_segment, type)":                            14,
	"offsetof(struct kvm_segment, unusable)":                        22,
	"sizeof(struct kvm_dtable)":                                     16,
	"offsetof(struct kvm_dtable, limit)":                            8,
	"sizeof(struct kvm_sregs)":                                      312,
	"offsetof(struct kvm_sregs, tr)":                                144,
	"offsetof(struct kvm_sregs, gdt)":                               192,
	"offsetof(struct kvm_sregs, cr0)":                               224,
	"offsetof(struct kvm_sregs, efer)":                              264,
	"sizeof(struct kvm_lapic_state)":                                1024,
	"sizeof(struct kvm_xcrs)":                                       392,
	"sizeof(struct kvm_debugregs)":                                  128,
	"sizeof(struct kvm_vcpu_events)":                                64,
	"sizeof(struct kvm_xsave)":                                      4096,
	"sizeof(struct kvm_irqchip)":                                    520,
	"offsetof(struct kvm_irqchip, chip)":                            8,
	"sizeof(struct kvm_clock_data)":                                 48,
	"offsetof(struct kvm_clock_data, realtime)":                     16,
	"offsetof(struct kvm_clock_data, host_tsc)":                     24,
	"sizeof(struct kvm_cpuid_entry2)":                               40,
	"offsetof(struct kvm_cpuid_entry2, eax)":                        12,
	"sizeof(struct kvm_msr_entry)":                                  16,
	"offsetof(struct kvm_msr_entry, data)":                          8,
	"offsetof(struct kvm_cpuid2, entries)":                          8,
	"offsetof(struct kvm_msrs, entries)":                            8,
	"offsetof(struct kvm_msr_list, indices)":                        4,
	"sizeof(struct kvm_userspace_memory_region)":                    32,
	"offsetof(struct kvm_userspace_memory_region, guest_phys_addr)": 8,
	"sizeof(struct kvm_irq_level)":                                  8,
	"sizeof(struct kvm_ioeventfd)":                                  64,
	"offsetof(struct kvm_ioeventfd, len)":                           16,
	"offsetof(struct kvm_ioeventfd, flags)":                         24,
	"sizeof(struct kvm_device_attr)":                                24,
	"offsetof(struct kvm_device_attr, group)":                       4,
	"offsetof(struct kvm_device_attr, addr)":                        16,
	"sizeof(struct kvm_mp_state)":                                   4,
}

// A request that is declared and not in requests would be refused by the process's own filter.
func TestRequestsIsComplete(t *testing.T) {
	source, err := os.ReadFile("const.go")
	if err != nil {
		t.Skipf("needs the sources: %v", err)
	}
	declared := strings.Count(string(source), " request = 0x")
	if declared == 0 || declared != len(requestNames) {
		t.Errorf("const.go declares %d requests, Requests knows %d", declared, len(requestNames))
	}
	if n := Requests(); len(n) != len(requestNames) || request(n[0]) != run {
		t.Errorf("Requests returns %d numbers", len(n))
	}
}

// Every number in this package is compared with the kernel headers of the machine, through the C compiler.
func TestNumbersMatchTheKernelHeaders(t *testing.T) {
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("needs a C compiler (apt install gcc libc6-dev)")
	}
	if _, err := os.Stat("/usr/include/linux/kvm.h"); err != nil {
		t.Skip("needs linux/kvm.h (apt install linux-libc-dev)")
	}
	var src strings.Builder
	src.WriteString("#include <linux/kvm.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {\n")
	want := map[string]uint64{}
	add := func(expr string, n uint64) {
		want[expr] = n
		fmt.Fprintf(&src, "printf(\"%%llu %%s\\n\", (unsigned long long)(%s), %q);\n", expr, expr)
	}
	for r, name := range requestNames {
		add(name, uint64(r))
	}
	for expr, n := range numbers {
		add(expr, n)
	}
	src.WriteString("return 0; }\n")
	dir := t.TempDir()
	file, bin := filepath.Join(dir, "a.c"), filepath.Join(dir, "a")
	if err := os.WriteFile(file, []byte(src.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(cc, "-o", bin, file).CombinedOutput(); err != nil {
		t.Fatalf("compile: %v\n%s", err, out)
	}
	out, err := exec.Command(bin).Output()
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for line := range strings.Lines(string(out)) {
		var n uint64
		number, expr, _ := strings.Cut(strings.TrimSpace(line), " ")
		if _, err := fmt.Sscan(number, &n); err != nil {
			t.Fatal(err)
		}
		if seen++; n != want[expr] {
			t.Errorf("%s is %#x in the headers, %#x here", expr, n, want[expr])
		}
	}
	if seen != len(want) {
		t.Errorf("compared %d numbers of %d", seen, len(want))
	}
}
