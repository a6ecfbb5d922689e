package process

import (
	"bytes"
	"errors"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"torpor/api/envd"
)

const (
	pipeChunk = 32 << 10
	ptyChunk  = 16 << 10
	// drainGrace is how long the output of a killed process must be silent before it counts as complete, though somebody
	// (a child of it) still holds the other end.
	drainGrace = 100 * time.Millisecond
	// drainLimit bounds what is still read after a process was killed: more than any pipe can hold is not its own.
	drainLimit = 1 << 20
)

// output is the read side of one output of a process: a pipe, or the controlling side of a terminal.
type output struct {
	file     *os.File
	chunk    int
	event    func([]byte) *envd.ProcessEvent_DataEvent
	draining atomic.Bool
	done     chan struct{} // closed when nothing more will be published
}

func newOutput(f *os.File, chunk int, event func([]byte) *envd.ProcessEvent_DataEvent) *output {
	return &output{file: f, chunk: chunk, event: event, done: make(chan struct{})}
}

func stdoutEvent(p []byte) *envd.ProcessEvent_DataEvent {
	return &envd.ProcessEvent_DataEvent{Output: &envd.ProcessEvent_DataEvent_Stdout{Stdout: p}}
}

func stderrEvent(p []byte) *envd.ProcessEvent_DataEvent {
	return &envd.ProcessEvent_DataEvent{Output: &envd.ProcessEvent_DataEvent_Stderr{Stderr: p}}
}

func ptyEvent(p []byte) *envd.ProcessEvent_DataEvent {
	return &envd.ProcessEvent_DataEvent{Output: &envd.ProcessEvent_DataEvent_Pty{Pty: p}}
}

// pump publishes the output until its end: end of file (for a terminal: EIO), or silence once drain was called.
func (o *output) pump(h *hub) {
	defer close(o.done)
	defer o.file.Close()
	buf := make([]byte, o.chunk)
	late := 0 // bytes read since drain
	for {
		n, err := o.file.Read(buf)
		if n > 0 {
			h.publish(&envd.ProcessEvent{Event: &envd.ProcessEvent_Data{Data: o.event(bytes.Clone(buf[:n]))}})
		}
		if o.draining.Load() {
			if late += n; late > drainLimit {
				return
			}
		}
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			if o.empty() {
				return
			}
			o.drain()
		case err != nil:
			return
		}
	}
}

// drain makes pump stop at the first silence. It may be called at any time, also more than once.
func (o *output) drain() {
	o.draining.Store(true)
	// An output that cannot have deadlines, or is closed, ends by itself.
	_ = o.file.SetReadDeadline(time.Now().Add(drainGrace))
}

// empty reports whether the kernel holds nothing to read; if it cannot tell, yes.
func (o *output) empty() bool {
	raw, err := o.file.SyscallConn()
	if err != nil {
		return true
	}
	waiting := 0
	err = raw.Control(func(fd uintptr) {
		if n, ioctlErr := unix.IoctlGetInt(int(fd), unix.TIOCINQ); ioctlErr == nil {
			waiting = n
		}
	})
	return err != nil || waiting == 0
}
