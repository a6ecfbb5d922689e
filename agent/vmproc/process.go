package vmproc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"torpor/api/apierr"
	"torpor/api/vmmpb"
)

const (
	binaryName = "torpor-vmm"
	socketFlag = "--socket"
	socketName = "vmm.sock"
	vsockName  = "vsock.sock"
)

// Supervisor starts and finds the VMMs of one agent.
type Supervisor struct {
	Binary string // path of torpor-vmm
	RunDir string // one directory a machine below it, for its sockets
}

// Dir returns the directory of the sockets of a machine.
func (s *Supervisor) Dir(name string) string { return filepath.Join(s.RunDir, name) }

// VsockSocket returns the path for a machine's hybrid vsock socket.
func (s *Supervisor) VsockSocket(name string) string { return filepath.Join(s.Dir(name), vsockName) }

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
// refused; transport errors pass as they are.
type Process struct {
	vmmpb.VMMService
	identity Identity
	client   *ttrpc.Client
	pidfd    pidfd
	cmd      *exec.Cmd     // nil if adopted
	done     chan struct{} // closed when the process has ended, or after Detach
	ended    string        // how it ended; written before done is closed
	detached bool          // it was let go of and may live; written before done is closed
}

// Start starts a VMM for the machine called name, with its output going to logPath, and returns when it answers on its
// socket. What an earlier machine of that name left in the socket directory is removed.
func (s *Supervisor) Start(ctx context.Context, name, logPath string) (_ *Process, err error) {
	dir := s.Dir(name)
	if err := os.RemoveAll(dir); err != nil {
		return nil, fmt.Errorf("clear socket directory: %w", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make socket directory: %w", err)
	}
	watch, err := watchDir(dir)
	if err != nil {
		return nil, err
	}
	defer watch.close()
	log, err := os.OpenFile(logPath, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open VMM log: %w", err)
	}
	defer log.Close()

	socket := filepath.Join(dir, socketName)
	cmd := exec.Command(s.Binary, socketFlag, socket, "--log", logPath)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = []string{}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // no terminal or group signal of the agent reaches it
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", s.Binary, err)
	}
	p, err := take(cmd.Process.Pid, cmd)
	if err != nil {
		return nil, errors.Join(err, cmd.Process.Kill(), cmd.Wait())
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Kill(context.WithoutCancel(ctx)))
		}
	}()
	// A VMM that dies at once must not cost the whole budget.
	dialCtx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(ctx, func() { cancel(ctx.Err()) })()
	go func() {
		select {
		case <-p.done:
			cancel(fmt.Errorf("the VMM ended before it answered (%s); see %s", p.ended, logPath))
		case <-dialCtx.Done():
		}
	}()
	conn, err := dialCreated(dialCtx, watch, socket)
	if err != nil {
		if cause := context.Cause(dialCtx); cause != nil {
			err = cause
		}
		return nil, fmt.Errorf("connect to the VMM: %w", err)
	}
	p.attach(conn)
	return p, nil
}

// Adopt takes over a VMM that an earlier agent started. ErrGone (wrapped) says that it does not live any more.
func (s *Supervisor) Adopt(ctx context.Context, name string, id Identity) (*Process, error) {
	p, err := s.hold(id)
	if err != nil {
		return nil, err
	}
	conn, err := dialBound(ctx, filepath.Join(s.Dir(name), socketName))
	if err != nil {
		p.Detach()
		return nil, fmt.Errorf("connect to VMM process %d: %w", id.PID, err)
	}
	p.attach(conn)
	return p, nil
}

// hold takes hold of a process without connecting to it: enough to kill it.
func (s *Supervisor) hold(id Identity) (*Process, error) {
	p, err := take(id.PID, nil)
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
func take(pid int, cmd *exec.Cmd) (*Process, error) {
	fd, err := openPidfd(pid)
	if err != nil {
		return nil, err
	}
	identity, err := identify(pid)
	if err != nil {
		fd.close()
		return nil, err
	}
	p := &Process{identity: identity, pidfd: fd, cmd: cmd, done: make(chan struct{}), ended: "let go of"}
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

func (p *Process) attach(conn net.Conn) {
	p.client = ttrpc.NewClient(conn, ttrpc.WithUnaryClientInterceptor(typedErrors))
	p.VMMService = vmmpb.NewVMMClient(p.client)
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

// Kill ends the process at once and returns when it is gone.
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
		return nil
	case <-ctx.Done():
		return fmt.Errorf("VMM process %d does not end: %w", p.identity.PID, errors.Join(killed, ctx.Err()))
	}
}

// Stop asks the process to end, and kills it if it has not within grace.
func (p *Process) Stop(ctx context.Context, grace time.Duration) error {
	quit, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	if _, err := p.Quit(quit, &vmmpb.QuitRequest{}); err == nil {
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
