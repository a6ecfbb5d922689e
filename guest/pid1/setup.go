package pid1

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// mount is one file system of the guest.
type mount struct {
	source, target, fstype string
	flags                  uintptr
	data                   string
}

// kernelMounts are needed to boot at all.
var kernelMounts = []mount{
	{"proc", "/proc", "proc", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
	{"sysfs", "/sys", "sysfs", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
	{"devtmpfs", "/dev", "devtmpfs", unix.MS_NOSUID, "mode=0755"},
}

// guestMounts are the rest. /tmp stays on the disk: memory is dearer.
var guestMounts = []mount{
	{"devpts", "/dev/pts", "devpts", unix.MS_NOSUID | unix.MS_NOEXEC, "gid=5,mode=620,ptmxmode=666"},
	{"tmpfs", "/dev/shm", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777"},
	{"tmpfs", "/run", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=0755"},
	{"cgroup2", "/sys/fs/cgroup", "cgroup2", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
}

// apply mounts; a file system that is there already is fine.
func (m mount) apply() error {
	if err := os.MkdirAll(m.target, 0o755); err != nil {
		return fmt.Errorf("making mount point %s: %w", m.target, err)
	}
	if err := unix.Mount(m.source, m.target, m.fstype, m.flags, m.data); err != nil && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("mounting %s: %w", m.target, err)
	}
	return nil
}

// openFiles are the limits a process of the guest starts with.
var openFiles = unix.Rlimit{Cur: 1 << 16, Max: 1 << 20}

// setup makes the booted root a place to live in. What fails is logged: a guest without it is better than none.
func (p *PID1) setup() {
	for _, step := range []struct {
		what string
		do   func() error
	}{
		{"mounting file systems", mountAll},
		{"making the links of /dev", linkDevices},
		{"preparing directories", makeDirs},
		{"naming the machine", setHostname},
		{"starting the loopback interface", loopbackUp},
	} {
		if err := step.do(); err != nil {
			p.Log.Error().Err(err).Msg(step.what)
		}
	}
}

func mountAll() error {
	var errs []error
	for _, m := range guestMounts {
		errs = append(errs, m.apply())
	}
	return errors.Join(errs...)
}

// linkDevices makes the links that udev would make.
func linkDevices() error {
	var errs []error
	for _, l := range [][2]string{
		{"/proc/self/fd", "/dev/fd"},
		{"fd/0", "/dev/stdin"},
		{"fd/1", "/dev/stdout"},
		{"fd/2", "/dev/stderr"},
		{"pts/ptmx", "/dev/ptmx"},
	} {
		_ = os.Remove(l[1]) // the kernel's own ptmx node; usually there is nothing
		errs = append(errs, os.Symlink(l[0], l[1]))
	}
	return errors.Join(errs...)
}

func makeDirs() error {
	var errs []error
	for _, d := range []struct {
		path string
		mode os.FileMode
	}{
		{"/tmp", 0o777 | os.ModeSticky}, {"/run/lock", 0o777 | os.ModeSticky}, {"/run/torpor", 0o700}, {"/run/user", 0o755},
	} {
		if err := os.MkdirAll(d.path, 0o755); err != nil {
			errs = append(errs, err)
			continue
		}
		errs = append(errs, os.Chmod(d.path, d.mode)) // not subject to the umask
	}
	return errors.Join(errs...)
}

func setHostname() error {
	name := "torpor"
	if raw, err := os.ReadFile("/etc/hostname"); err == nil && strings.TrimSpace(string(raw)) != "" {
		name = strings.TrimSpace(string(raw))
	}
	return unix.Sethostname([]byte(name))
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("opening a socket: %w", err)
	}
	defer func() { _ = unix.Close(fd) }() // never sent on
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, ifr); err != nil {
		return fmt.Errorf("reading flags: %w", err)
	}
	ifr.SetUint16(ifr.Uint16() | unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr); err != nil {
		return fmt.Errorf("setting flags: %w", err)
	}
	return nil
}
