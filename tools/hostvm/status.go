package hostvm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"
)

// Status describes an instance.
type Status struct {
	Instance     string        `json:"instance"`
	State        string        `json:"state"`            // down, running, frozen, or silent: it lives but runs no commands
	Reason       string        `json:"reason,omitempty"` // why it is not running
	PID          int           `json:"pid,omitempty"`    // of QEMU
	Started      time.Time     `json:"started,omitzero"`
	FirstProcess string        `json:"firstProcess,omitempty"` // seconds from the kernel's start to the first process
	Quiet        time.Duration `json:"quiet,omitempty"`        // since the last line on the console, nanoseconds
	Forwards     []Forward     `json:"forwards,omitempty"`
	Images       string        `json:"images,omitempty"` // digest of the image set in it
	MemoryMiB    int           `json:"memoryMiB,omitempty"`
	CPUs         int           `json:"cpus,omitempty"`
}

// probeBudget is how long a trivial command may take before the machine is called silent.
const probeBudget = 30 * time.Second

// Status looks whether the machine runs, whether its heartbeat beats, and whether it runs a trivial command.
func (i *Instance) Status(ctx context.Context) (Status, error) {
	s := Status{Instance: i.name, State: "down"}
	st, p, err := i.running()
	if errors.Is(err, ErrDown) {
		return s, nil
	}
	if err != nil {
		return s, err
	}
	s.PID, s.Started, s.FirstProcess = p.pid, st.Started, st.FirstProc
	s.Forwards, s.Images, s.MemoryMiB, s.CPUs = st.Forwards, st.Images, st.MemoryMiB, st.CPUs
	if s.Quiet, err = quiet(i.Console(), time.Now()); err != nil {
		return s, err
	}
	if s.Quiet > frozenAfter {
		s.State, s.Reason = "frozen", ErrFrozen.Error()
		return s, nil
	}
	probe, cancel := context.WithTimeoutCause(ctx, probeBudget, fmt.Errorf("no answer within %v", probeBudget))
	defer cancel()
	if _, err := i.Exec(probe, "true", nil, io.Discard, io.Discard); err != nil {
		s.State, s.Reason = "silent", err.Error()
		return s, nil
	}
	s.State = "running"
	return s, nil
}
