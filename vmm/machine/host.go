package machine

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"torpor/vmm/kvm"
	"torpor/vmm/snapshot"
)

// KVMModule is the name of the module behind /dev/kvm, empty where it cannot be seen.
func KVMModule() string {
	for _, module := range []string{"kvm_pvm", "kvm_intel", "kvm_amd"} {
		if _, err := os.Stat("/sys/module/" + module); err == nil {
			return module
		}
	}
	return ""
}

// Host is what machines use of the host they run on. It is opened once, when the process starts: nothing is opened by its path
// afterwards, and a jail may take all paths away. Machines borrow it.
type Host struct {
	kvm     *kvm.System
	pagemap *os.File // /proc/self/pagemap
	statm   *os.File // /proc/self/statm
	kernel  snapshot.Host
}

// OpenHost opens what machines need and checks that the KVM behind dev, an open /dev/kvm, can do all they ask of it. module
// names that KVM (KVMModule). dev stays the caller's.
func OpenHost(dev *os.File, module string) (_ *Host, err error) {
	h := &Host{kernel: snapshot.Host{KVM: module}}
	defer func() {
		if err != nil {
			err = errors.Join(err, h.Close())
		}
	}()
	if h.kvm, err = openKVM(dev); err != nil {
		return nil, err
	}
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return nil, fmt.Errorf("find the kernel's release: %w", err)
	}
	h.kernel.Kernel = unix.ByteSliceToString(name.Release[:])
	if h.pagemap, err = os.Open("/proc/self/pagemap"); err != nil {
		return nil, fmt.Errorf("find written pages: %w", err)
	}
	if h.statm, err = os.Open("/proc/self/statm"); err != nil {
		return nil, fmt.Errorf("find resident size: %w", err)
	}
	return h, nil
}

// Close closes the files. No machine may use them any more.
func (h *Host) Close() error {
	var errs []error
	if h.kvm != nil {
		errs = append(errs, h.kvm.Close())
	}
	for _, f := range []*os.File{h.pagemap, h.statm} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

// capabilities the machine cannot do without.
var required = []struct {
	cap  kvm.Cap
	name string
}{
	{kvm.CapIRQChip, "IRQCHIP"},
	{kvm.CapUserMemory, "USER_MEMORY"},
	{kvm.CapIOEventFD, "IOEVENTFD"},
	{kvm.CapImmediateExit, "IMMEDIATE_EXIT"},
	{kvm.CapXSave, "XSAVE"},
	{kvm.CapXCRs, "XCRS"},
}

func openKVM(dev *os.File) (*kvm.System, error) {
	sys, err := kvm.New(dev)
	if err != nil {
		return nil, err
	}
	for _, r := range required {
		n, err := sys.Extension(r.cap)
		if err == nil && n == 0 {
			err = errors.New("it is too old or built without it")
		}
		if err != nil {
			_ = sys.Close() // nothing was made with it
			return nil, fmt.Errorf("this host's KVM lacks %s: %w", r.name, err)
		}
	}
	return sys, nil
}

// residentBytes is the resident set of this process; 0 if it cannot be known.
func (h *Host) residentBytes() uint64 {
	b := make([]byte, 128)
	n, err := h.statm.ReadAt(b, 0)
	if n == 0 && err != nil {
		return 0
	}
	var size, resident uint64
	if _, err := fmt.Sscan(string(b[:n]), &size, &resident); err != nil {
		return 0
	}
	return resident * uint64(os.Getpagesize())
}
