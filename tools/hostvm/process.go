package hostvm

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// process is a process that cannot be mistaken for a later one with the same number: its start time goes with it.
type process struct {
	pid   int
	start uint64 // clock ticks since boot, /proc/<pid>/stat field 22
}

// wrapper is a shell script that becomes its arguments from the second on, having written its process id and start time
// to the first: there is no moment at which QEMU runs and nobody knows its number. The start time is field 22; the
// shell's name, field 2, has no spaces.
const wrapper = `set -e
pid_file=$1; shift
read -r stat </proc/$$/stat
echo "$$ $(set -- $stat; shift 21; echo "$1")" >"$pid_file"
exec "$@"`

// parsePID reads the contents of a pid file: "<pid> <start time>".
func parsePID(text string) (process, error) {
	f := strings.Fields(text)
	if len(f) != 2 {
		return process{}, fmt.Errorf("pid file holds %d words, not 2", len(f))
	}
	pid, err := strconv.Atoi(f[0])
	if err != nil || pid <= 1 {
		return process{}, fmt.Errorf("pid file: no process number in %q", f[0])
	}
	start, err := strconv.ParseUint(f[1], 10, 64)
	if err != nil {
		return process{}, fmt.Errorf("pid file: no start time in %q", f[1])
	}
	return process{pid: pid, start: start}, nil
}

// readPID reads a pid file; ok is false if there is none or it holds no process (a launcher killed while writing).
func readPID(path string) (p process, ok bool, err error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return process{}, false, nil
	}
	if err != nil {
		return process{}, false, err
	}
	p, err = parsePID(string(b))
	return p, err == nil, nil
}

// startTime finds field 22 in the text of /proc/<pid>/stat. The second field is the command's name in parentheses and
// may itself hold spaces and parentheses, so counting starts after the last one.
func startTime(stat string) (uint64, error) {
	i := strings.LastIndexByte(stat, ')')
	if i < 0 {
		return 0, errors.New("no command name in process status")
	}
	f := strings.Fields(stat[i+1:])
	const at = 22 - 3 // the first field after the name is the third
	if len(f) <= at {
		return 0, fmt.Errorf("process status has %d fields", len(f)+2)
	}
	return strconv.ParseUint(f[at], 10, 64)
}

// alive tells whether the very process still runs. A zombie does not.
func (p process) alive() bool {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(p.pid), "stat"))
	if err != nil {
		return false
	}
	start, err := startTime(string(b))
	if err != nil || start != p.start {
		return false
	}
	state := strings.TrimSpace(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	return !strings.HasPrefix(state, "Z") && !strings.HasPrefix(state, "X")
}

// open gets a handle that signals reach nobody else through, whatever happens to the number. It fails with ESRCH if the
// process has ended.
func (p process) open() (fd int, err error) {
	fd, err = unix.PidfdOpen(p.pid, 0)
	if err != nil {
		return -1, err
	}
	if !p.alive() { // asked after opening: now the handle cannot be for a successor
		_ = unix.Close(fd)
		return -1, unix.ESRCH
	}
	return fd, nil
}

// signal sends a signal to the process; to one that has ended it does nothing.
func (p process) signal(sig unix.Signal) error {
	fd, err := p.open()
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open process %d: %w", p.pid, err)
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.PidfdSendSignal(fd, sig, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("signal process %d: %w", p.pid, err)
	}
	return nil
}

// wait waits until the process has ended, ctx is done, or d is over; it tells whether the process has ended.
func (p process) wait(ctx context.Context, d time.Duration) bool {
	deadline := time.NewTimer(d)
	defer deadline.Stop()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for p.alive() {
		select {
		case <-ctx.Done():
			return false
		case <-deadline.C:
			return !p.alive()
		case <-tick.C:
		}
	}
	return true
}

// stop ends the process: by SIGTERM, which QEMU takes as "flush and exit", then by SIGKILL.
func (p process) stop(ctx context.Context) error {
	if err := p.signal(unix.SIGTERM); err != nil {
		return err
	}
	if p.wait(ctx, 10*time.Second) {
		return nil
	}
	if err := p.signal(unix.SIGKILL); err != nil {
		return err
	}
	if !p.wait(ctx, 10*time.Second) {
		return fmt.Errorf("process %d does not end", p.pid)
	}
	return nil
}

// lock takes an exclusive flock on a file, which it makes if need be, waiting for whoever holds it until ctx is done.
// The kernel releases it when the holder closes the file or dies.
func lock(ctx context.Context, path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			_ = f.Close()
			return nil, &os.PathError{Op: "flock", Path: path, Err: err}
		}
		select {
		case <-ctx.Done():
			_ = f.Close()
			return nil, fmt.Errorf("another process is starting or stopping this machine: %w", ctx.Err())
		case <-tick.C:
		}
	}
}
