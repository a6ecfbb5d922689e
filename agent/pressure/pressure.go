// Package pressure tells how much memory the host has left and when it runs short of it.
package pressure

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// trigger asks the kernel to tell when tasks stood still for want of memory for 150 ms of any second
// (Documentation/accounting/psi.rst).
const trigger = "some 150000 1000000"

// lookEvery is how often available memory is looked at: a host without swap has no stalls to tell of until it is too late, and
// many kernels count none.
const lookEvery = 2 * time.Second

// Host is the memory of this host.
type Host struct {
	Floor   uint64 // bytes; with less available the host is short
	Meminfo string // path of /proc/meminfo
	PSI     string // path of /proc/pressure/memory
}

// New returns the host's memory, which is short when less than floor bytes are available.
func New(floor uint64) *Host {
	return &Host{Floor: floor, Meminfo: "/proc/meminfo", PSI: "/proc/pressure/memory"}
}

// Available returns the bytes that can be used without swapping: MemAvailable of proc(5).
func (h *Host) Available() (uint64, error) {
	f, err := os.Open(h.Meminfo)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		rest, ok := strings.CutPrefix(lines.Text(), "MemAvailable:")
		if !ok {
			continue
		}
		kib, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
		if err != nil || kib > 1<<50 {
			return 0, fmt.Errorf("%s: %q is no amount of memory", h.Meminfo, rest)
		}
		return kib << 10, nil
	}
	return 0, fmt.Errorf("%s does not tell MemAvailable", h.Meminfo)
}

// Watch calls short, one call at a time, whenever the host runs short of memory: when the kernel tells of stalls, if it counts
// them, and when less than the floor is available. It returns when ctx ends.
func (h *Host) Watch(ctx context.Context, short func()) {
	stalls, err := h.stalls(ctx)
	if err != nil {
		stalls = nil // a nil channel tells nothing
	}
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-stalls:
			short()
		case <-look.C:
			if free, err := h.Available(); err == nil && free < h.Floor {
				short()
			}
		}
	}
}

// stalls returns a channel that tells of stalls until ctx ends, and is never closed.
func (h *Host) stalls(ctx context.Context) (<-chan struct{}, error) {
	psi, err := unix.Open(h.PSI, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	stop, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err == nil {
		_, err = unix.Write(psi, append([]byte(trigger), 0))
		if err != nil {
			err = errors.Join(err, unix.Close(stop))
		}
	}
	if err != nil {
		return nil, errors.Join(err, unix.Close(psi))
	}
	told := make(chan struct{}, 1)
	ended := make(chan struct{})
	context.AfterFunc(ctx, func() {
		_, _ = unix.Write(stop, []byte{1, 0, 0, 0, 0, 0, 0, 0}) // cannot fail: the counter is far from full
		<-ended
		_, _ = unix.Close(stop), unix.Close(psi)
	})
	go func() {
		defer close(ended)
		waitForStalls(psi, stop, told)
	}()
	return told, nil
}

// waitForStalls tells of every event of psi until stop is readable.
func waitForStalls(psi, stop int, told chan<- struct{}) {
	for {
		fds := []unix.PollFd{{Fd: int32(psi), Events: unix.POLLPRI}, {Fd: int32(stop), Events: unix.POLLIN}}
		_, err := unix.Poll(fds, -1)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil, fds[1].Revents != 0, fds[0].Revents&unix.POLLERR != 0:
			return
		}
		select {
		case told <- struct{}{}:
		default:
		}
	}
}
