package process

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"torpor/api/envd"
)

// proc is one process started through the service. It belongs to no request.
type proc struct {
	config  *envd.ProcessConfig
	tag     *string
	pid     int
	handle  *os.Process
	in      *input // nil: no stdin
	tty     bool
	outputs []*output
	hub     hub
	expired atomic.Bool // killed at the deadline of its Start
}

// run sees one process through: it publishes its output, reaps it the moment it ends (reaped is then called), and
// publishes the end once all output was published.
func (p *proc) run(reaped func()) {
	for _, o := range p.outputs {
		go o.pump(&p.hub)
	}
	state, err := p.handle.Wait()
	reaped()
	// The output of a process is complete at end of file, which its children may delay: a pipeline behind a process
	// substitution writes after its shell has gone. Whoever killed the process does not want to wait for that.
	if p.tty || state == nil || !state.Exited() {
		for _, o := range p.outputs {
			o.drain()
		}
	}
	for _, o := range p.outputs {
		<-o.done
	}
	p.in.close()
	p.hub.finish(&envd.ProcessEvent{Event: &envd.ProcessEvent_End{End: endEvent(state, err)}})
}

// endEvent spells how a process ended. A status of nil means that it could not be learnt.
func endEvent(state *os.ProcessState, err error) *envd.ProcessEvent_EndEvent {
	if state == nil {
		text := fmt.Sprintf("waiting for the process: %v", err)
		return &envd.ProcessEvent_EndEvent{ExitCode: -1, Status: text, Error: &text}
	}
	end := &envd.ProcessEvent_EndEvent{
		ExitCode: int32(state.ExitCode()), Exited: state.Exited(), Status: state.String(),
	}
	if !state.Success() {
		end.Error = proto.String(state.String())
	}
	return end
}

// signal sends sig to the process itself. os.ErrProcessDone if it has ended.
func (p *proc) signal(sig syscall.Signal) error {
	if err := p.handle.Signal(sig); err != nil {
		return fmt.Errorf("signalling process %d: %w", p.pid, err)
	}
	return nil
}

// killAfter ends the process and all of its process group when d has passed. The answer stops the clock.
func (p *proc) killAfter(d time.Duration) *time.Timer {
	return time.AfterFunc(d, func() {
		p.expired.Store(true)
		// ESRCH: all of the group ended by itself just now.
		_ = unix.Kill(-p.pid, unix.SIGKILL)
		for _, o := range p.outputs {
			o.drain()
		}
	})
}

// resize tells the terminal of the process its size.
func (p *proc) resize(size *envd.PTY_Size) error {
	if !p.tty {
		return errNoTerminal
	}
	raw, err := p.in.file.SyscallConn()
	if err != nil {
		return fmt.Errorf("resizing the terminal: %w", err)
	}
	ctlErr := raw.Control(func(fd uintptr) { err = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, winsize(size)) })
	if err = errors.Join(ctlErr, err); err != nil {
		return fmt.Errorf("resizing the terminal: %w", err)
	}
	return nil
}

var errNoTerminal = errors.New("process has no terminal")

// winsize clamps what a client asks to what a terminal can be.
func winsize(size *envd.PTY_Size) *unix.Winsize {
	clamp := func(n uint32) uint16 { return uint16(min(n, 1<<16-1)) }
	return &unix.Winsize{Col: clamp(size.GetCols()), Row: clamp(size.GetRows())}
}

func (p *proc) info() *envd.ProcessInfo {
	return &envd.ProcessInfo{Config: p.config, Pid: uint32(p.pid), Tag: p.tag}
}

// closeAll closes files of a start that failed.
func closeAll(files []*os.File) {
	for _, f := range slices.Backward(files) {
		if f != nil {
			_ = f.Close() // never written to
		}
	}
}
