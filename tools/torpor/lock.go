package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// errLocked says that a supervisor holds the lock already.
var errLocked = errors.New("Torpor is up already")

// lock is held by the one supervisor of a host for its life, and holds its pid: the kernel frees it whatever becomes of the
// process, so a lock that is held is a supervisor that lives. It is made of write locks of the open file description
// (fcntl(2), F_OFD_SETLK), because the kernel can be asked about such a lock without taking it: who looks never stands in the
// way.
type lock struct{ file *os.File }

// The bytes of the file that are locked. Nothing but their numbers matters.
const (
	byteOwner = 0 // whoever has it is the one supervisor
	bytePid   = 1 // held by the owner as soon as its pid is in the file
)

// takeLock never waits for a supervisor: errLocked if another has it.
func takeLock(path string) (*lock, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("making the run directory: %w", err)
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening the lock of the supervisor: %w", err)
	}
	if err := own(f); err != nil {
		f.Close()
		return nil, err
	}
	if err := tellPid(f); err != nil {
		f.Close()
		return nil, fmt.Errorf("writing %s: %w", path, err)
	}
	return &lock{f}, nil
}

func own(f *os.File) error {
	for {
		err := lockByte(f, unix.F_OFD_SETLK, unix.F_WRLCK, byteOwner)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES) {
			return fmt.Errorf("locking %s: %w", f.Name(), err)
		}
		held, err := heldByWriter(f, byteOwner)
		if err != nil {
			return err
		}
		if held {
			return errLocked
		}
		// What stood in the way was awaitRelease of another process, which lets go at once.
	}
}

func tellPid(f *os.File) error {
	if err := f.Truncate(0); err != nil {
		return err
	}
	if _, err := f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0); err != nil {
		return err
	}
	return lockByte(f, unix.F_OFD_SETLK, unix.F_WRLCK, bytePid)
}

func (l *lock) release() { l.file.Close() }

// holder returns the pid of the supervisor that holds the lock, 0 if nobody does.
func holder(path string) (int, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("looking at the supervisor's lock: %w", err)
	}
	defer f.Close()
	if held, err := heldByWriter(f, bytePid); !held || err != nil {
		return 0, err
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return 0, fmt.Errorf("reading the supervisor's pid: %w", err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(raw)))
	if err != nil || pid <= 1 {
		return 0, fmt.Errorf("%s is held but holds no pid: stop the process that has it open by hand", path)
	}
	return pid, nil
}

// awaitRelease returns when the lock has been let go of. It waits in the kernel, not in a loop; the waiting thread is left
// behind when ctx ends first, which is just before this program ends.
func awaitRelease(ctx context.Context, path string) error {
	freed := make(chan error, 1)
	go func() { freed <- awaitWriter(path) }()
	select {
	case err := <-freed:
		return err
	case <-ctx.Done():
		return fmt.Errorf("the supervisor did not stop in time: %w", ctx.Err())
	}
}

func awaitWriter(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	return lockByte(f, unix.F_OFD_SETLKW, unix.F_RDLCK, byteOwner)
}

// heldByWriter asks for the write lock of another open file; a reader is somebody in awaitRelease.
func heldByWriter(f *os.File, at int64) (bool, error) {
	l := unix.Flock_t{Type: unix.F_RDLCK, Start: at, Len: 1}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &l); err != nil {
		return false, fmt.Errorf("testing %s: %w", f.Name(), err)
	}
	return l.Type == unix.F_WRLCK, nil
}

func lockByte(f *os.File, cmd int, kind int16, at int64) error {
	for {
		err := unix.FcntlFlock(f.Fd(), cmd, &unix.Flock_t{Type: kind, Start: at, Len: 1})
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
