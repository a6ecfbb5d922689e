package hostvm

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// KVM_GET_API_VERSION and the only version there has ever been (Linux Documentation/virt/kvm/api.rst, 4.1).
const (
	kvmGetAPIVersion = 0xAE00
	kvmAPIVersion    = 12
)

// Hardware tells whether this machine can run Torpor natively: its processor has VT-x or AMD-V and /dev/kvm is backed by
// it. The sentence says why, or why not and what to do.
func Hardware() (ok bool, why string) {
	cpuinfo, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return false, fmt.Sprintf("the processor is unknown: %v", err)
	}
	flag := virtFlag(string(cpuinfo))
	switch {
	case flag == "" && exists("/sys/module/kvm_pvm"):
		return false, "the processor has no vmx or svm; /dev/kvm is the page-table-based kvm_pvm, which cannot run Linux guests"
	case flag == "":
		return false, "the processor has no vmx or svm: use a bare-metal host or turn on nested virtualisation"
	case exists("/sys/module/kvm_pvm"):
		return false, "/dev/kvm is the page-table-based kvm_pvm: load kvm_intel or kvm_amd instead"
	}
	if err := probeKVM("/dev/kvm"); err != nil {
		return false, fmt.Sprintf("the processor has %s, but %v", flag, err)
	}
	return true, "the processor has " + flag + " and /dev/kvm works"
}

// virtFlag finds which virtualisation extension the first processor of a /proc/cpuinfo text has: "vmx", "svm" or "".
func virtFlag(cpuinfo string) string {
	for line := range strings.Lines(cpuinfo) {
		name, flags, ok := strings.Cut(line, ":")
		if !ok || strings.TrimSpace(name) != "flags" {
			continue // "vmx flags" is another line
		}
		for f := range strings.FieldsSeq(flags) {
			if f == "vmx" || f == "svm" {
				return f
			}
		}
		return ""
	}
	return ""
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// probeKVM says in words what is wrong with a KVM device, or nil.
func probeKVM(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s is missing: load kvm_intel or kvm_amd", path)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%s may not be opened: run as root or join the group kvm", path)
	case err != nil:
		return fmt.Errorf("%s does not open: %w", path, err)
	}
	defer f.Close()
	v, err := unix.IoctlRetInt(int(f.Fd()), kvmGetAPIVersion)
	if err != nil {
		return fmt.Errorf("%s is not KVM: %w", path, err)
	}
	if v != kvmAPIVersion {
		return fmt.Errorf("%s speaks KVM API version %d, not %d", path, v, kvmAPIVersion)
	}
	return nil
}
