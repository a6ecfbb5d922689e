package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/rs/zerolog"
	"golang.org/x/sys/unix"

	"torpor/api/vmmpb"
	"torpor/vmm/machine"
)

// newLog is the log of the machine whose sockets are in dir.
func newLog(dir string) zerolog.Logger {
	return zerolog.New(os.Stderr).With().Timestamp().Str("machine", dir).Logger()
}

// claimed makes the process that of a machine it was not started for. log, which may be nil, is closed. Preconditions: making.
func (s *server) claimed(c *vmmpb.Claim, log *os.File) error {
	if c == nil {
		return nil
	}
	if log != nil {
		defer log.Close()
		if err := unix.Dup3(int(log.Fd()), unix.Stderr, 0); err != nil { // where a crash is written too
			return os.NewSyscallError("dup3", err)
		}
	}
	if err := retitle(machineFlag, c.GetDirectory()); err != nil {
		return fmt.Errorf("%w: %w", machine.ErrConfig, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.log = newLog(c.GetDirectory())
	return nil
}

// logger is the log of now, for those who do not come after the making of the machine.
func (s *server) logger() *zerolog.Logger {
	s.mu.Lock()
	defer s.mu.Unlock()
	log := s.log
	return &log
}

// machineFlag is the flag whose value is the directory of the machine's sockets.
const machineFlag = "machine"

var errTitle = errors.New("the process was not started with room for this directory")

// retitle puts a new value in the place of that of a flag, in the memory of this process from which the kernel answers who asks for
// its arguments (proc_pid_cmdline(5)). What is left of the old value is filled with zero bytes.
func retitle(flag, value string) error {
	for i, arg := range os.Args[:len(os.Args)-1] {
		if arg != "--"+flag {
			continue
		}
		if len(value) > len(os.Args[i+1]) {
			return errTitle
		}
		overwrite(os.Args[i+1], value)
		return nil
	}
	return errTitle
}
