package cell

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// waitEmpty returns when no process is in the cell. The kernel modifies cgroup.events when that changes, which inotify tells
// (the kernel's Documentation/admin-guide/cgroup-v2.rst, "cgroup.events").
func (c *Cell) waitEmpty(ctx context.Context) error {
	events := filepath.Join(c.dir(), "cgroup.events")
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return os.NewSyscallError("inotify_init1", err)
	}
	f := os.NewFile(uintptr(fd), "inotify")
	defer f.Close()
	if _, err := unix.InotifyAddWatch(fd, events, unix.IN_MODIFY); err != nil {
		return fmt.Errorf("watch %s: %w", events, os.NewSyscallError("inotify_add_watch", err))
	}
	defer context.AfterFunc(ctx, func() { _ = f.SetReadDeadline(time.Unix(1, 0)) })()
	var discarded [4096]byte
	for {
		now, err := words(events) // "populated 1 frozen 0"
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if i := slices.Index(now, "populated"); i >= 0 && i+1 < len(now) && now[i+1] == "0" {
			return nil
		}
		if _, err := f.Read(discarded[:]); err != nil {
			return errors.Join(err, ctx.Err())
		}
	}
}
