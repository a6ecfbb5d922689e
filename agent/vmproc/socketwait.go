package vmproc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// dirWatch tells when something is created in a directory (inotify). It is opened before the process that will create the
// file is started, so that no event can be missed.
type dirWatch struct{ f *os.File }

func watchDir(dir string) (dirWatch, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return dirWatch{}, os.NewSyscallError("inotify_init1", err)
	}
	f := os.NewFile(uintptr(fd), "inotify")
	if _, err := unix.InotifyAddWatch(fd, dir, unix.IN_CREATE|unix.IN_MOVED_TO); err != nil {
		f.Close()
		return dirWatch{}, fmt.Errorf("watch %s: %w", dir, os.NewSyscallError("inotify_add_watch", err))
	}
	return dirWatch{f}, nil
}

// next returns at the next event, or with an error when ctx ends.
func (w dirWatch) next(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { _ = w.f.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	var events [4096]byte // which file it was does not matter: the caller looks for its own
	if _, err := w.f.Read(events[:]); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("read inotify events: %w", err)
	}
	return nil
}

func (w dirWatch) close() { w.f.Close() }

// dialCreated connects to a unix socket that is about to be made in the watched directory.
func dialCreated(ctx context.Context, w dirWatch, socket string) (net.Conn, error) {
	for {
		if _, err := os.Stat(socket); err == nil {
			return dialBound(ctx, socket)
		}
		if err := w.next(ctx); err != nil {
			return nil, fmt.Errorf("wait for %s: %w", filepath.Base(socket), err)
		}
	}
}

// dialBound connects to a socket whose file exists. Between bind and listen, an instant apart in the VMM, a connection is
// refused and no event tells the difference: that gap alone is bridged by trying again.
func dialBound(ctx context.Context, socket string) (net.Conn, error) {
	for pause := time.Millisecond; ; pause *= 2 {
		conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
		if err == nil || !errors.Is(err, unix.ECONNREFUSED) || pause > 100*time.Millisecond {
			return conn, err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}
