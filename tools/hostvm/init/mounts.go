package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// config is /etc/hostvm/config.json, written by tools/hostvm for one start of the machine.
type config struct {
	Hostname string            `json:"hostname"`
	Listen   string            `json:"listen"` // address of the exec server
	Token    string            `json:"token"`
	Disks    map[string]string `json:"disks"` // virtio serial number -> where it is mounted
}

func readConfig(path string) (config, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return config{}, err
	}
	var c config
	if err := json.Unmarshal(b, &c); err != nil {
		return config{}, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

// dataSerial marks the one disk that is mounted for writing; the others hold files that never change.
const dataSerial = "data"

// ownRoot puts a mount of the initial file system over itself. The kernel's rootfs cannot be pivoted away from; a mount
// on top of it can, and what runs here (a jail, a container) expects to be able to.
func ownRoot() error {
	const dir = "/.root"
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := unix.Mount("/", dir, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind the root: %w", err)
	}
	if err := unix.Chdir(dir); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	return unix.Chdir("/")
}

func mountAll() error {
	const plain = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	for _, m := range []struct {
		fs, dir string
		flags   uintptr
		data    string
	}{
		{"proc", "/proc", plain, ""},
		{"sysfs", "/sys", plain, ""},
		{"devtmpfs", "/dev", unix.MS_NOSUID, "mode=0755"},
		{"devpts", "/dev/pts", unix.MS_NOSUID | unix.MS_NOEXEC, "ptmxmode=0666,mode=0620,gid=5"},
		{"tmpfs", "/dev/shm", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777"},
		{"tmpfs", "/run", unix.MS_NOSUID | unix.MS_NODEV, "mode=0755"},
		{"tmpfs", "/tmp", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777"},
		{"cgroup2", "/sys/fs/cgroup", plain, "nsdelegate"},
		{"debugfs", "/sys/kernel/debug", plain, ""},
	} {
		if err := os.MkdirAll(m.dir, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.fs, m.dir, m.fs, m.flags, m.data); err != nil {
			return fmt.Errorf("mount %s on %s: %w", m.fs, m.dir, err)
		}
	}
	for name, target := range map[string]string{
		"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
	} {
		if err := os.Symlink(target, "/dev/"+name); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	return nil
}

// mountDisks mounts each disk of the configuration, found by its serial number: the order of names is the kernel's.
func mountDisks(c config) error {
	found, err := disksBySerial()
	if err != nil {
		return err
	}
	// The data disk first: the others are mounted inside it.
	if dir, ok := c.Disks[dataSerial]; ok {
		if err := mountDisk(found, dataSerial, dir, 0); err != nil {
			return err
		}
	}
	for serial, dir := range c.Disks {
		if serial == dataSerial {
			continue
		}
		if err := mountDisk(found, serial, dir, unix.MS_RDONLY); err != nil {
			return err
		}
	}
	return nil
}

func mountDisk(found map[string]string, serial, dir string, flags uintptr) error {
	dev, ok := found[serial]
	if !ok {
		return fmt.Errorf("no disk with serial number %q", serial)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	data := ""
	if flags&unix.MS_RDONLY == 0 {
		data = "discard" // gives freed space back to the sparse file outside
	}
	if err := unix.Mount(dev, dir, "ext4", flags|unix.MS_NOATIME, data); err != nil {
		return fmt.Errorf("mount %s disk on %s: %w", serial, dir, err)
	}
	return nil
}

func disksBySerial() (map[string]string, error) {
	names, err := filepath.Glob("/sys/block/vd*")
	if err != nil {
		return nil, err
	}
	found := make(map[string]string)
	for _, n := range names {
		b, err := os.ReadFile(filepath.Join(n, "serial"))
		if err != nil {
			return nil, err
		}
		found[strings.TrimSpace(string(b))] = "/dev/" + filepath.Base(n)
	}
	return found, nil
}

// endGrace is how long processes have to end by themselves at shutdown before they are killed.
const endGrace = 15 * time.Second

// powerOff ends every process, flushes and unmounts the disks, and turns the machine off. It does not return.
func powerOff() {
	_ = unix.Kill(-1, unix.SIGTERM) // fails only when there is nobody left to tell
	for deadline := time.Now().Add(endGrace); time.Now().Before(deadline) && !alone(); {
		time.Sleep(50 * time.Millisecond) // nothing to wait on: most of these are not our children
	}
	_ = unix.Kill(-1, unix.SIGKILL)
	alone()
	unix.Sync()
	for _, dir := range mountedDisks() {
		if err := unix.Unmount(dir, 0); err != nil {
			report("unmount %s: %v", dir, err)
			_ = unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, "") // second best: clean on disk
		}
	}
	unix.Sync()
	report("power off")
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF); err != nil {
		report("power off: %v", err)
	}
	select {} // the kernel panics if process 1 returns
}

// alone reaps what has ended and tells whether no user process but this one is left.
func alone() bool {
	reap(0)
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return true
	}
	for _, d := range dirs {
		// Kernel threads have an empty command line.
		if b, err := os.ReadFile(d + "/cmdline"); err == nil && len(b) > 0 && d != "/proc/1" {
			return false
		}
	}
	return true
}

// mountedDisks lists where block devices are mounted, the innermost first.
func mountedDisks() []string {
	b, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil
	}
	var dirs []string
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 1 && strings.HasPrefix(f[0], "/dev/") {
			dirs = append([]string{f[1]}, dirs...)
		}
	}
	return dirs
}
