package main

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"torpor/agent/cell"
)

// minFreeBytes is what the data disk must have free at start: one template (memory, disk layer) and room to pause into.
const minFreeBytes = 1 << 30

// preflight finds what would make the start fail, and says it in one sentence each.
func preflight(o upOptions) error {
	if err := kvmUsable("/dev/kvm"); err != nil {
		return err
	}
	if err := cell.Check(); err != nil {
		return err
	}
	if err := os.MkdirAll(o.data, 0o755); err != nil {
		return fmt.Errorf("the data directory cannot be made: %w", err)
	}
	free, err := freeBytes(o.data)
	if err != nil {
		return err
	}
	if free < minFreeBytes {
		return fmt.Errorf("the disk of %s is full (%d MiB free, %d MiB needed): free some space and start again",
			o.data, free>>20, int64(minFreeBytes)>>20)
	}
	if _, err := os.Stat(filepath.Join(o.images, "base", "image.json")); err != nil {
		return fmt.Errorf("there is no guest image at %s: build one with `make images`", filepath.Join(o.images, "base"))
	}
	return portFree(o.listen)
}

func kvmUsable(dev string) error {
	f, err := os.OpenFile(dev, os.O_RDWR, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s is missing: load the KVM module of this CPU (modprobe kvm_intel or kvm_amd), or run without --native to use an emulated host", dev)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%s may not be opened by this user: add it to the group kvm, or be root", dev)
	case err != nil:
		return fmt.Errorf("%s cannot be opened: %w", dev, err)
	}
	return f.Close()
}

func freeBytes(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("measuring the free space of %s: %w", dir, err)
	}
	return int64(st.Bavail) * st.Bsize, nil
}

func portFree(listen string) error {
	l, err := net.Listen("tcp", listen)
	if errors.Is(err, unix.EADDRINUSE) {
		return fmt.Errorf("port in use: something else listens on %s; stop it or choose another with --listen", listen)
	}
	if err != nil {
		return fmt.Errorf("cannot listen on %s: %w", listen, err)
	}
	return l.Close()
}
