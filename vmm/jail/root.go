package jail

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

const (
	programPath = "/torpor-vmm"
	procPath    = "/proc"

	// scaffold is where the new root is put together: a directory that every host has and that making it does not need. The
	// host does not see what happens there.
	scaffold = "/sys"
)

const inert = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

// mount is the arguments of one mount(2).
type mount struct {
	source, target, fs string
	flags              uintptr
	options            string
}

// changeRoot moves to a read-only root with nothing in it but the program, which is the host's very file and shares its page
// cache, and a /proc that shows the processes of this pid namespace, one, and nothing else.
// Preconditions: the mount namespace is the caller's own.
func changeRoot(program string) error {
	err := mountAll(
		mount{target: "/", flags: unix.MS_REC | unix.MS_PRIVATE}, // nothing below reaches the host's namespace
		mount{"tmpfs", scaffold, "tmpfs", inert, "mode=0555,size=4k,nr_inodes=4"},
	)
	if err != nil {
		return err
	}
	if err := os.WriteFile(scaffold+programPath, nil, 0o444); err != nil {
		return err
	}
	if err := os.Mkdir(scaffold+procPath, 0o555); err != nil {
		return err
	}
	err = mountAll(
		mount{source: program, target: scaffold + programPath, flags: unix.MS_BIND},
		mount{target: scaffold + programPath, flags: unix.MS_REMOUNT | unix.MS_BIND | unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV},
		mount{"proc", scaffold + procPath, "proc", inert | unix.MS_RDONLY, "subset=pid,hidepid=2"},
		mount{target: scaffold, flags: unix.MS_REMOUNT | unix.MS_BIND | unix.MS_RDONLY | inert},
	)
	if err != nil {
		return err
	}
	if err := os.Chdir(scaffold); err != nil {
		return err
	}
	// The old root ends up on top of the new one, where the working directory is (pivot_root(2), "pivot_root(".", ".")").
	if err := unix.PivotRoot(".", "."); err != nil {
		return os.NewSyscallError("pivot_root", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("let go of the old root: %w", err)
	}
	return os.Chdir("/")
}

func mountAll(all ...mount) error {
	for _, m := range all {
		if err := unix.Mount(m.source, m.target, m.fs, m.flags, m.options); err != nil {
			return fmt.Errorf("mount %s on %s: %w", m.source, m.target, err)
		}
	}
	return nil
}
