package vmproc

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// pidfd holds one process. Its file is in the runtime's poller, so that waiting for the death costs no thread.
type pidfd struct{ f *os.File }

// openPidfd takes hold of process pid. The caller must check afterwards that it is the process meant.
func openPidfd(pid int) (pidfd, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) {
		return pidfd{}, ErrGone
	}
	if err != nil {
		return pidfd{}, os.NewSyscallError("pidfd_open", err)
	}
	return pidfd{os.NewFile(uintptr(fd), fmt.Sprintf("pidfd:%d", pid))}, nil
}

// wait returns when the process has ended, or with an error when close was called first.
func (p pidfd) wait() error {
	raw, err := p.f.SyscallConn()
	if err != nil {
		return fmt.Errorf("watch process: %w", err)
	}
	return raw.Read(func(fd uintptr) bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return err == nil && n > 0
	})
}

// kill sends SIGKILL. A process that has ended already is no error.
func (p pidfd) kill() error {
	raw, err := p.f.SyscallConn()
	if err != nil {
		return fmt.Errorf("kill process: %w", err)
	}
	var sent error
	if err := raw.Control(func(fd uintptr) { sent = unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0) }); err != nil {
		return fmt.Errorf("kill process: %w", err)
	}
	if sent != nil && !errors.Is(sent, unix.ESRCH) {
		return os.NewSyscallError("pidfd_send_signal", sent)
	}
	return nil
}

func (p pidfd) close() { p.f.Close() }
