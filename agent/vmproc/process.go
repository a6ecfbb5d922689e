package vmproc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"torpor/agent/cell"
	"torpor/api/apierr"
	"torpor/api/vmmpb"
)

const binaryName = "torpor-vmm"

// Supervisor starts and finds the VMMs of one agent.
type Supervisor struct {
	Binary string      // path of torpor-vmm
	RunDir string      // one directory a machine below it, for its sockets
	KVM    string      // path of the KVM device
	Cells  *cell.Cells // nil: the VMMs are not jailed, for tests where there is no root or cgroup v2
	// OpenTap opens the tap of a network card by the name that a request has for it; the file is closed when the VMM has it.
	// nil: machines have no network cards.
	OpenTap func(name string) (*os.File, error)
}

// Dir returns the directory of the sockets of a machine.
func (s *Supervisor) Dir(name string) string { return filepath.Join(s.RunDir, name) }

// VsockSocket returns the path of the socket by which a machine's guest is reached.
func (s *Supervisor) VsockSocket(name string) string { return filepath.Join(s.Dir(name), vsockSocket) }

// Clear removes the sockets of a machine that has ended.
func (s *Supervisor) Clear(name string) error {
	if err := os.RemoveAll(s.Dir(name)); err != nil {
		return fmt.Errorf("clear socket directory: %w", err)
	}
	return nil
}

// End kills the process of an identity; one that does not live is no error.
func (s *Supervisor) End(ctx context.Context, id Identity) error {
	p, err := s.hold(id)
	if errors.Is(err, ErrGone) {
		return nil
	}
	if err != nil {
		return err
	}
	return p.Kill(ctx)
}

// Scan lists the living VMMs of this run directory.
func (s *Supervisor) Scan() ([]Found, error) { return scan(s.RunDir) }

// Process is one living (or ended) torpor-vmm and the connection to it. Its calls answer *apierr.Error for what the VMM
// refused; transport errors pass as they are. In the requests of Boot, Restore, Save and Checkpoint files are paths.
type Process struct {
	vmmpb.VMMService
	identity Identity
	client   *ttrpc.Client
	files    string // socket for files, api/fdpass
	openTap  func(name string) (*os.File, error)
	sent     atomic.Uint64 // numbers the files sent
	pidfd    pidfd
	cmd      *exec.Cmd     // nil if adopted
	cell     *cell.Cell    // nil: none
	ahead    string        // its name while it was started ahead and not claimed
	claim    *vmmpb.Claim  // for its first request: it was started ahead; nil: it was not, or knows
	done     chan struct{} // closed when the process has ended, or after Detach
	ended    string        // how it ended; written before done is closed
	detached bool          // it was let go of and may live; written before done is closed
}

// Start starts a VMM for the machine called name, with its output going to logPath, and returns when it answers. What an
// earlier machine of that name left in the socket directory is removed.
func (s *Supervisor) Start(ctx context.Context, name, logPath string) (_ *Process, err error) {
	log, err := os.OpenFile(logPath, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open VMM log: %w", err)
	}
	defer log.Close()
	p, err := s.launch(ctx, name, log)
	if err != nil {
		return nil, err
	}
	err = s.connect(ctx, p, name)
	if err == nil {
		_, err = p.Status(ctx, &vmmpb.StatusRequest{})
	}
	if err != nil {
		// The end of one that has died by itself is not the kill's, and comes at once: its sockets went with it.
		killed := p.Kill(context.WithoutCancel(ctx))
		return nil, errors.Join(fmt.Errorf("the VMM did not answer (%s): %w; see %s", p.ended, err, logPath), killed)
	}
	calmMonitor(p.identity.PID)
	return p, nil
}

// Adopt takes over a VMM that an earlier agent started. ErrGone (wrapped) says that it does not live any more.
func (s *Supervisor) Adopt(ctx context.Context, name string, id Identity) (*Process, error) {
	p, err := s.hold(id)
	if err != nil {
		return nil, err
	}
	if err := s.connect(ctx, p, name); err != nil {
		p.Detach()
		return nil, fmt.Errorf("VMM process %d: %w", id.PID, err)
	}
	return p, nil
}

// hold takes hold of a process without connecting to it: enough to kill it.
func (s *Supervisor) hold(id Identity) (*Process, error) {
	var itsCell *cell.Cell
	if s.Cells != nil {
		itsCell, _ = s.Cells.Of(id.PID) // one without was started by an agent that made none, or is gone
	}
	p, err := take(id.PID, nil, itsCell)
	if err != nil {
		return nil, err
	}
	if p.identity != id {
		p.Detach()
		return nil, ErrGone
	}
	return p, nil
}

// take opens the pidfd first and reads the identity second: the identity is then that of the process held.
func take(pid int, cmd *exec.Cmd, c *cell.Cell) (*Process, error) {
	fd, err := openPidfd(pid)
	if err != nil {
		return nil, err
	}
	identity, err := identify(pid)
	if err != nil {
		fd.close()
		return nil, err
	}
	p := &Process{identity: identity, pidfd: fd, cmd: cmd, cell: c, done: make(chan struct{}), ended: "let go of"}
	go p.watch()
	return p, nil
}

// watch waits for the process's end; it ends with the process or at Detach.
func (p *Process) watch() {
	defer close(p.done)
	if p.pidfd.wait() != nil {
		p.detached = true
		return
	}
	p.ended = "ended"
	if p.cmd != nil {
		if err := p.cmd.Wait(); err != nil {
			p.ended = err.Error()
		} else {
			p.ended = "exit status 0"
		}
	}
	p.pidfd.close()
}

// connect connects to the process's control socket, which is there before the process is.
func (s *Supervisor) connect(ctx context.Context, p *Process, name string) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(s.Dir(name), controlSocket))
	if err != nil {
		return fmt.Errorf("connect to the VMM: %w", err)
	}
	p.files = filepath.Join(s.Dir(name), filesSocket)
	p.openTap = s.OpenTap
	p.client = ttrpc.NewClient(conn, ttrpc.WithUnaryClientInterceptor(typedErrors))
	p.VMMService = vmmpb.NewVMMClient(p.client)
	return nil
}

// typedErrors gives the callers the *apierr.Error the VMM answered with.
func typedErrors(ctx context.Context, req *ttrpc.Request, resp *ttrpc.Response, _ *ttrpc.UnaryClientInfo, call ttrpc.Invoker) error {
	if err := call(ctx, req, resp); err != nil {
		return err
	}
	if s := resp.GetStatus(); s != nil && s.GetCode() != int32(codes.OK) {
		return apierr.FromStatus(status.ErrorProto(s))
	}
	return nil
}

// Identity returns what the process can be found by again.
func (p *Process) Identity() Identity { return p.identity }

// Done is closed when the process has ended (or was detached).
func (p *Process) Done() <-chan struct{} { return p.done }

// Ended says how the process ended; valid after Done is closed.
func (p *Process) Ended() string { return p.ended }

// errDetached is what a Process that was let go of answers: it knows nothing any more.
var errDetached = errors.New("the VMM process was let go of")

// Kill ends the process at once and returns when it and its cell are gone.
func (p *Process) Kill(ctx context.Context) error {
	var killed error
	select {
	case <-p.done:
	default:
		killed = p.pidfd.kill() // fails harmlessly if the process ended this instant: done follows
	}
	select {
	case <-p.done:
		p.closeClient()
		if p.detached {
			return errDetached
		}
		if p.cell != nil {
			return p.cell.Remove(ctx)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("VMM process %d does not end: %w", p.identity.PID, errors.Join(killed, ctx.Err()))
	}
}

// Stop asks the process to end, and kills it if it has not within grace.
func (p *Process) Stop(ctx context.Context, grace time.Duration) error {
	quit, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	// It may go before it answers, and has its disks to flush then as well.
	if _, err := p.Quit(quit, &vmmpb.QuitRequest{}); err == nil || errors.Is(err, ttrpc.ErrClosed) {
		select {
		case <-p.done:
		case <-quit.Done():
		}
	}
	return p.Kill(ctx)
}

// Detach gives the process up without ending it; Done is closed.
func (p *Process) Detach() {
	p.pidfd.close()
	<-p.done
	p.closeClient()
}

func (p *Process) closeClient() {
	if p.client != nil {
		p.client.Close()
	}
}
