package kvm

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// System is an open /dev/kvm.
type System struct{ fd int }

// Open opens /dev/kvm and checks the API version.
func Open() (*System, error) {
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return New(f)
}

// New returns the KVM behind an open /dev/kvm and checks the API version. The file stays the caller's.
func New(f *os.File) (*System, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("kvm: %w", os.NewSyscallError("fcntl", err))
	}
	s := &System{fd: fd}
	v, err := ioctlInt(fd, getAPIVersion, 0)
	if err == nil && v != APIVersion {
		err = fmt.Errorf("kvm: API version %d, want %d", v, APIVersion)
	}
	if err != nil {
		return nil, closeOn(err, s.Close)
	}
	return s, nil
}

// Close closes the descriptor. VMs made from it live on.
func (s *System) Close() error { return closeFD(s.fd) }

// Extension issues KVM_CHECK_EXTENSION: 0 means absent, the meaning of other values is the capability's.
func (s *System) Extension(c Cap) (int, error) {
	n, err := ioctlInt(s.fd, checkExtension, uintptr(c))
	return int(n), err
}

// SupportedCPUID issues KVM_GET_SUPPORTED_CPUID: what this host can offer a guest.
func (s *System) SupportedCPUID() ([]CPUIDEntry, error) {
	t := &cpuidTable{n: maxCPUID}
	if _, err := ioctlPtr(s.fd, getSupportedCPUID, t); err != nil {
		return nil, err
	}
	return t.entries[:min(t.n, maxCPUID)], nil
}

// MSRIndexList issues KVM_GET_MSR_INDEX_LIST: the MSRs KVM can save and restore on this host.
func (s *System) MSRIndexList() ([]uint32, error) {
	l := new(msrList)
	l.n = uint32(len(l.indices))
	if _, err := ioctlPtr(s.fd, getMSRIndexList, l); err != nil {
		return nil, err
	}
	return l.indices[:min(int(l.n), len(l.indices))], nil
}

// CreateVM issues KVM_CREATE_VM.
func (s *System) CreateVM() (*VM, error) {
	size, err := ioctlInt(s.fd, getVCPUMmapSize, 0)
	if err != nil {
		return nil, err
	}
	if size < minRunBytes {
		return nil, fmt.Errorf("kvm: kvm_run is %d bytes, want at least %d", size, minRunBytes)
	}
	fd, err := ioctlInt(s.fd, createVM, 0)
	if err != nil {
		return nil, err
	}
	return &VM{fd: int(fd), runBytes: int(size)}, nil
}

func closeFD(fd int) error { return os.NewSyscallError("close", unix.Close(fd)) }

// closeOn closes after an error that matters more than one of the close.
func closeOn(err error, undo func() error) error {
	if cerr := undo(); cerr != nil {
		return fmt.Errorf("%w (and %w)", err, cerr)
	}
	return err
}
