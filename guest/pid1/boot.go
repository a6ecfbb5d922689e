package pid1

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	moduleList = "/modules.order"
	rootDevice = "/dev/vda"
	newRoot    = "/newroot"
	// rootWait bounds the wait for the root disk after its driver was loaded.
	rootWait = 60 * time.Second
	// SecondStage is the argument by which PID 1 knows that it runs on the real root.
	SecondStage = "torpor-second-stage"
)

// boot is the first stage, in the initramfs: it loads the drivers, mounts the root disk, makes it the root, and runs this
// very binary again as the second stage. The file system of the initramfs stays below, with nothing but the binary in it,
// so the root disk need not hold one. It returns only on failure.
func (p *PID1) boot() error {
	for _, m := range kernelMounts {
		if err := m.apply(); err != nil {
			return err
		}
	}
	events, err := listenUevents() // before the drivers: no event is missed
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(events) }() // only read
	modules, err := p.loadModules()
	if err != nil {
		return err
	}
	if err := awaitDevice(events, rootDevice, time.Now().Add(rootWait)); err != nil {
		return err
	}
	if err := os.MkdirAll(newRoot, 0o755); err != nil {
		return fmt.Errorf("making the mount point of the root: %w", err)
	}
	if err := unix.Mount(rootDevice, newRoot, "ext4", unix.MS_NOATIME, ""); err != nil {
		return fmt.Errorf("mounting the root disk: %w", err)
	}
	for _, name := range append(modules, moduleList) {
		_ = os.Remove(name) // gives the memory back; a leftover only costs some
	}
	if err := switchRoot(); err != nil {
		return err
	}
	err = syscall.Exec("/proc/self/exe", []string{"envd", SecondStage}, []string{"PATH=" + p.Path, "HOME=/root", "TERM=linux"})
	return fmt.Errorf("starting the second stage: %w", err)
}

// loadModules loads the kernel modules listed in the initramfs, in order. One that does not fit the machine is skipped.
func (p *PID1) loadModules() ([]string, error) {
	f, err := os.Open(moduleList)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil // all drivers are built in
	}
	if err != nil {
		return nil, fmt.Errorf("reading the list of modules: %w", err)
	}
	defer f.Close()
	var names []string
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		name := strings.TrimSpace(lines.Text())
		if name == "" || strings.HasPrefix(name, "#") {
			continue
		}
		names = append(names, name)
		if err := loadModule(name); err != nil {
			p.Log.Warn().Err(err).Str("module", name).Msg("a kernel module was not loaded")
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("reading the list of modules: %w", err)
	}
	return names, nil
}

func loadModule(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	return nil
}

// listenUevents subscribes to the kernel's device events.
func listenUevents() (int, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return -1, fmt.Errorf("opening the device event socket: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1}); err != nil {
		_ = unix.Close(fd) // never used
		return -1, fmt.Errorf("subscribing to device events: %w", err)
	}
	return fd, nil
}

// awaitDevice returns when the device node exists. The kernel makes the node before it sends the event of the device, so
// looking again after each event is enough.
func awaitDevice(events int, device string, deadline time.Time) error {
	buf := make([]byte, 64<<10)
	for {
		if _, err := os.Stat(device); err == nil {
			return nil
		}
		left := time.Until(deadline)
		if left <= 0 {
			return fmt.Errorf("the root disk %s did not appear within %v", device, rootWait)
		}
		_, err := unix.Poll([]unix.PollFd{{Fd: int32(events), Events: unix.POLLIN}}, int(left.Milliseconds())+1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("waiting for the root disk: %w", err)
		}
		// ENOBUFS (events were lost) also means: look again.
		if _, _, err := unix.Recvfrom(events, buf, unix.MSG_DONTWAIT); err != nil &&
			!errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.ENOBUFS) {
			return fmt.Errorf("reading device events: %w", err)
		}
	}
}

// switchRoot moves the kernel's file systems and then the new root over the old.
func switchRoot() error {
	for _, m := range kernelMounts {
		if err := unix.Mount(m.target, newRoot+m.target, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("moving %s to the new root: %w", m.target, err)
		}
	}
	if err := unix.Chdir(newRoot); err != nil {
		return fmt.Errorf("entering the new root: %w", err)
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("moving the new root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("changing the root: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return fmt.Errorf("entering the root: %w", err)
	}
	return nil
}
