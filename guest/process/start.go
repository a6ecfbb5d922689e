package process

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"torpor/api/envd"
	"torpor/guest/env"
)

// StartError says why a process could not be started; the fault is the request's.
type StartError struct{ Reason string }

func (e *StartError) Error() string { return e.Reason }

// spec is a process to start, with all rules applied.
type spec struct {
	request *envd.StartRequest
	user    env.User
	dir     string
	environ []string
}

// ends are the two sides of a process's standard streams.
type ends struct {
	child   []*os.File // stdin, stdout, stderr; closed in this process after the start
	in      *input
	outputs []*output
	sys     *syscall.SysProcAttr
}

// start starts the process and leaves it to its caller to run.
func (s *Service) start(sp spec) (*proc, error) {
	config := sp.request.GetProcess()
	path, err := lookPath(config.GetCmd(), sp.environ, sp.dir)
	if err != nil {
		return nil, err
	}
	var e *ends
	if sp.request.GetPty() != nil {
		e, err = terminalEnds(sp.request.GetPty().GetSize(), sp.user)
	} else {
		e, err = pipeEnds(sp.request.Stdin == nil || sp.request.GetStdin())
	}
	if err != nil {
		return nil, err
	}
	e.sys.Credential = s.credential(sp.user)
	attr := &os.ProcAttr{Dir: sp.dir, Env: sp.environ, Files: e.child, Sys: e.sys}
	handle, err := s.shield.start(path, append([]string{config.GetCmd()}, config.GetArgs()...), attr)
	closeAll(slices.Compact(e.child))
	if err != nil {
		e.close()
		return nil, &StartError{Reason: fmt.Sprintf("starting '%s': %v", config.GetCmd(), err)}
	}
	p := &proc{
		config: config, tag: sp.request.Tag, pid: handle.Pid, handle: handle,
		in: e.in, tty: sp.request.GetPty() != nil, outputs: e.outputs,
	}
	p.hub.stall = stallLimit
	return p, nil
}

// credential is nil if the process is to run as the daemon itself: then no privilege is needed.
func (s *Service) credential(u env.User) *syscall.Credential {
	if !s.setuid {
		return nil
	}
	return &syscall.Credential{Uid: u.UID, Gid: u.GID, Groups: u.Groups}
}

func (e *ends) close() {
	e.in.close()
	for _, o := range e.outputs {
		_ = o.file.Close() // never read from
	}
}

// pipeEnds gives the process a session of its own, so that it and its children can be killed together.
func pipeEnds(stdin bool) (_ *ends, err error) {
	var files []*os.File
	defer func() {
		if err != nil {
			closeAll(files)
		}
	}()
	pipe := func() (r, w *os.File, err error) {
		if r, w, err = os.Pipe(); err != nil {
			return nil, nil, fmt.Errorf("making a pipe: %w", err)
		}
		files = append(files, r, w)
		return r, w, nil
	}
	e := &ends{sys: &syscall.SysProcAttr{Setsid: true}}
	var in *os.File
	if stdin {
		var w *os.File
		if in, w, err = pipe(); err != nil {
			return nil, err
		}
		e.in = newInput(w)
	} else if in, err = os.Open(os.DevNull); err != nil {
		return nil, fmt.Errorf("opening the empty stdin: %w", err)
	} else {
		files = append(files, in)
	}
	outR, outW, err := pipe()
	if err != nil {
		return nil, err
	}
	errR, errW, err := pipe()
	if err != nil {
		return nil, err
	}
	e.child = []*os.File{in, outW, errW}
	e.outputs = []*output{newOutput(outR, pipeChunk, stdoutEvent), newOutput(errR, pipeChunk, stderrEvent)}
	return e, nil
}

// terminalEnds gives the process a session with a controlling terminal, owned by its user.
func terminalEnds(size *envd.PTY_Size, u env.User) (_ *ends, err error) {
	blocking, tty, err := pty.Open()
	if err != nil {
		return nil, fmt.Errorf("opening a terminal: %w", err)
	}
	defer blocking.Close()
	defer func() {
		if err != nil {
			_ = tty.Close()
		}
	}()
	if size.GetCols() == 0 && size.GetRows() == 0 {
		size = &envd.PTY_Size{Cols: 80, Rows: 24}
	}
	if err := unix.IoctlSetWinsize(int(tty.Fd()), unix.TIOCSWINSZ, winsize(size)); err != nil {
		return nil, fmt.Errorf("sizing the terminal: %w", err)
	}
	if err := os.Chown(tty.Name(), int(u.UID), -1); err != nil && !errors.Is(err, os.ErrPermission) {
		return nil, fmt.Errorf("giving the terminal to %s: %w", u.Name, err)
	}
	// Two handles, reading and writing, that can be interrupted; the one from pty.Open blocks.
	r, err := reopen(blocking)
	if err != nil {
		return nil, err
	}
	w, err := reopen(blocking)
	if err != nil {
		_ = r.Close()
		return nil, err
	}
	return &ends{
		child:   []*os.File{tty, tty, tty},
		in:      newInput(w),
		outputs: []*output{newOutput(r, ptyChunk, ptyEvent)},
		sys:     &syscall.SysProcAttr{Setsid: true, Setctty: true, Ctty: 0},
	}, nil
}

// reopen returns another handle of f that works with the runtime's poller.
func reopen(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, fmt.Errorf("duplicating a terminal handle: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("making a terminal handle non-blocking: %w", err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// lookPath finds the file of a command as the process itself would: in the PATH of its own environment.
func lookPath(cmd string, environ []string, dir string) (string, error) {
	if cmd == "" {
		return "", &StartError{Reason: "process.cmd is empty"}
	}
	if strings.Contains(cmd, "/") {
		return cmd, nil // the kernel judges; a relative one starts at the working directory
	}
	path := ""
	for _, kv := range environ {
		if v, ok := strings.CutPrefix(kv, "PATH="); ok {
			path = v
		}
	}
	for _, d := range filepath.SplitList(path) {
		candidate := filepath.Join(d, cmd)
		if !filepath.IsAbs(candidate) {
			candidate = filepath.Join(dir, candidate)
		}
		if info, err := os.Stat(candidate); err == nil && !info.IsDir() && info.Mode()&0o111 != 0 {
			return candidate, nil
		}
	}
	return "", &StartError{Reason: fmt.Sprintf("command '%s' was not found in PATH", cmd)}
}

// workdir applies the rules for the working directory of a process.
func (s *Service) workdir(u env.User, cwd string) (string, error) {
	dir, err := s.store.Resolve(u, cwd)
	if err != nil {
		return "", &StartError{Reason: err.Error()}
	}
	info, err := os.Stat(dir)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return "", &StartError{Reason: fmt.Sprintf("cwd '%s' does not exist", dir)}
	case err != nil:
		return "", &StartError{Reason: fmt.Sprintf("cwd '%s' cannot be used: %v", dir, err)}
	case !info.IsDir():
		return "", &StartError{Reason: fmt.Sprintf("cwd '%s' is not a directory", dir)}
	}
	return dir, nil
}

// list spells an environment as the kernel takes it; names it cannot take are an error.
func list(vars map[string]string) ([]string, error) {
	environ := make([]string, 0, len(vars))
	for k, v := range vars {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return nil, &StartError{Reason: fmt.Sprintf("environment variable %q cannot be set", k)}
		}
		environ = append(environ, k+"="+v)
	}
	slices.Sort(environ)
	return environ, nil
}
