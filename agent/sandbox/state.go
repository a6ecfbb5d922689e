package sandbox

import (
	"fmt"
	"slices"
)

// VMState is the state of a sandbox's VM.
type VMState string

// The states of a VM.
const (
	Creating VMState = "creating"
	Running  VMState = "running"
	Pausing  VMState = "pausing"
	Paused   VMState = "paused"
	Resuming VMState = "resuming"
	Stopping VMState = "stopping" // being killed
	Stopped  VMState = "stopped"  // nothing runs; removed, or its VM ended by itself
	Failed   VMState = "failed"   // its files are damaged
)

// States lists every VMState.
var States = []VMState{Creating, Running, Pausing, Paused, Resuming, Stopping, Stopped, Failed}

// EnvdState is what is known of envd in the present incarnation.
type EnvdState string

// The states of envd.
const (
	Absent       EnvdState = "absent"
	Starting     EnvdState = "starting"
	Ready        EnvdState = "ready"
	Unresponsive EnvdState = "unresponsive"
)

// next is the whole of the legal moves; the empty state is that of a sandbox that does not exist.
var next = map[VMState][]VMState{
	"":       {Creating},
	Creating: {Running, Stopping},
	Running:  {Pausing, Stopped, Stopping},
	Pausing:  {Running, Paused, Stopped, Stopping},
	Paused:   {Resuming, Paused, Failed, Stopping}, // paused anew: rolled back
	Resuming: {Running, Paused, Stopped, Failed, Stopping},
	Stopped:  {Resuming, Paused, Failed, Stopping},
	Failed:   {Resuming, Paused, Stopping},
	Stopping: {Stopped},
}

// TransitionError is an illegal move.
type TransitionError struct{ From, To VMState }

func (e *TransitionError) Error() string {
	return fmt.Sprintf("a sandbox cannot go from %q to %q", string(e.From), string(e.To))
}

// checkMove returns a *TransitionError if from may not be followed by to.
func checkMove(from, to VMState) error {
	if slices.Contains(next[from], to) {
		return nil
	}
	return &TransitionError{from, to}
}
