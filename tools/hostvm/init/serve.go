package main

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"torpor/tools/hostvm/wire"
)

const (
	startBudget = 10 * time.Second       // for a client to say who it is and what it wants
	leaveBudget = 10 * time.Second       // for a client to close the connection once it was told the exit status
	aliveEvery  = 2 * time.Second        // how often a client hears from us
	drainReads  = 16                     // of MaxPayload each, more than a pipe holds, from one that is still being written to
	drainIdle   = 300 * time.Millisecond // how long output may pause, once the command has ended, before we stop listening for it
)

// serve answers exec connections, each on its own goroutines, until ctx ends or the listener breaks.
func serve(ctx context.Context, path string) error {
	cfg, err := readConfig(path)
	if err != nil {
		return err
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", cfg.Listen)
	if err != nil {
		return err
	}
	var sessions sync.WaitGroup
	defer sessions.Wait()
	for {
		conn, err := l.Accept()
		if err != nil {
			return fmt.Errorf("accept: %w", err)
		}
		sessions.Go(func() {
			defer conn.Close()
			if err := serveConn(conn, cfg.Token, followClock); err != nil {
				report("exec: %v", err)
			}
		})
	}
}

// serveConn runs one command, having told clock the client's time. An error is one nobody else was told of.
func serveConn(conn net.Conn, token string, clock func(time.Time)) error {
	if err := conn.SetDeadline(time.Now().Add(startBudget)); err != nil {
		return err
	}
	if err := wire.Write(conn, wire.Alive, nil); err != nil {
		return fmt.Errorf("greet: %w", err)
	}
	f, err := wire.Read(conn)
	if err != nil {
		return fmt.Errorf("first frame: %w", err)
	}
	var c wire.Command
	if f.Type != wire.Start {
		return fmt.Errorf("first frame is %c", f.Type)
	}
	if err := f.Decode(&c); err != nil {
		return err
	}
	if subtle.ConstantTimeCompare([]byte(c.Token), []byte(token)) != 1 {
		return fmt.Errorf("wrong token")
	}
	if err := conn.SetDeadline(time.Time{}); err != nil {
		return err
	}
	clock(time.Unix(0, c.Now))
	s := &session{conn: conn, done: make(chan struct{}), left: make(chan struct{})}
	result, err := s.run(c)
	if err != nil {
		result = wire.Result{Error: err.Error()}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	// The client may have gone: then there is nobody to tell. If it has not, it closes first: were we to close with input of
	// its unread, the kernel would reset the connection, and what it has not read yet would be lost to it.
	if wire.WriteJSON(conn, wire.Exit, result) == nil && err == nil {
		_ = conn.SetReadDeadline(time.Now().Add(leaveBudget))
		<-s.left
	}
	return nil
}

// session is one running command.
type session struct {
	conn net.Conn

	mu sync.Mutex // one frame at a time on conn

	ended atomic.Bool   // the command has been waited for: its process group is not ours to signal any more
	done  chan struct{} // closed with ended
	left  chan struct{} // closed when nothing more can come from the client
}

// run starts the command, moves its bytes, and answers how it ended. If the client goes away first, the command's
// process group is killed; a process that made a session of its own (setsid) lives on, as after a logout.
func (s *session) run(c wire.Command) (wire.Result, error) {
	cmd := exec.Command("/bin/sh", "-c", c.Shell)
	cmd.Env = append(os.Environ(), c.Env...)
	cmd.Dir = "/"
	cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true}
	pipes, err := connect(cmd)
	if err != nil {
		return wire.Result{}, err
	}
	defer pipes.close()
	err = cmd.Start()
	pipes.closeChildEnds()
	if err != nil {
		return wire.Result{}, err
	}

	var outputs, others sync.WaitGroup
	outputs.Go(func() { s.pump(wire.Stdout, pipes.stdout) })
	outputs.Go(func() { s.pump(wire.Stderr, pipes.stderr) })
	others.Go(func() { s.sayAlive(cmd.Process.Pid) })
	go func() { // ends when the connection does, for which serveConn waits
		defer close(s.left)
		s.feed(pipes.stdin, cmd.Process.Pid)
	}()

	err = cmd.Wait()
	s.ended.Store(true)
	close(s.done)
	for _, p := range []*os.File{pipes.stdout, pipes.stderr} {
		_ = p.SetReadDeadline(time.Now().Add(drainIdle)) // a pipe always takes a deadline
	}
	outputs.Wait()
	others.Wait()
	if cmd.ProcessState == nil {
		return wire.Result{}, err
	}
	ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus)
	if ok && ws.Signaled() {
		return wire.Result{Code: 128 + int(ws.Signal())}, nil
	}
	return wire.Result{Code: cmd.ProcessState.ExitCode()}, nil
}

// pump sends what the command writes. It ends at end of file or, since a process left in the background may hold the
// pipe open for ever, once the command has ended and nothing more comes for a moment.
func (s *session) pump(t wire.Type, r *os.File) {
	buf := make([]byte, wire.MaxPayload)
	for {
		n, err := r.Read(buf)
		if n > 0 && s.send(t, buf[:n]) != nil {
			return // feed sees the broken connection too and kills the command
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			s.drain(t, r, buf)
			return
		}
		if err != nil {
			return
		}
		if s.ended.Load() {
			_ = r.SetReadDeadline(time.Now().Add(drainIdle))
		}
	}
}

// drain sends what is in the pipe already. On a busy machine the deadline may pass before pump has read at all, and a
// read past its deadline looks at nothing.
func (s *session) drain(t wire.Type, r *os.File, buf []byte) {
	_ = r.SetReadDeadline(time.Time{})
	raw, err := r.SyscallConn()
	if err != nil {
		return
	}
	for range drainReads {
		n := 0
		_ = raw.Read(func(fd uintptr) bool {
			n, _ = unix.Read(int(fd), buf) // does not block: EAGAIN when there is nothing, which is the end here
			return true
		})
		if n <= 0 || s.send(t, buf[:n]) != nil {
			return
		}
	}
}

// sayAlive lets the client know that the machine is not frozen. It is also how a client's going away is noticed while feed
// is stuck on a command that reads no input: a write to the closed connection fails.
func (s *session) sayAlive(pid int) {
	t := time.NewTicker(aliveEvery)
	defer t.Stop()
	for {
		select {
		case <-s.done:
			return
		case <-t.C:
			if s.send(wire.Alive, nil) != nil {
				s.kill(pid)
				return
			}
		}
	}
}

func (s *session) send(t wire.Type, p []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return wire.Write(s.conn, t, p)
}

// feed gives the client's input to the command, and kills the command when the client goes away.
func (s *session) feed(stdin *os.File, pid int) {
	open := true
	for {
		f, err := wire.Read(s.conn)
		if err != nil || f.Type != wire.Stdin {
			s.kill(pid)
			return
		}
		switch {
		case !open:
		case len(f.Payload) == 0:
			_ = stdin.Close()
			open = false
		default:
			_, _ = stdin.Write(f.Payload) // a command that reads no more just misses it
		}
	}
}

// kill ends the command's process group, unless the command has ended by itself.
func (s *session) kill(pid int) {
	if !s.ended.Load() {
		_ = unix.Kill(-pid, unix.SIGKILL)
	}
}

// stdio is the three pipes of a command: our ends and the child's.
type stdio struct {
	stdin, stdout, stderr *os.File
	child                 []*os.File
}

func connect(cmd *exec.Cmd) (*stdio, error) {
	p := &stdio{}
	for _, end := range []struct {
		ours  **os.File
		set   func(*os.File)
		input bool
	}{
		{&p.stdin, func(f *os.File) { cmd.Stdin = f }, true},
		{&p.stdout, func(f *os.File) { cmd.Stdout = f }, false},
		{&p.stderr, func(f *os.File) { cmd.Stderr = f }, false},
	} {
		r, w, err := os.Pipe()
		if err != nil {
			p.closeChildEnds()
			p.close()
			return nil, err
		}
		theirs := r
		*end.ours = w
		if !end.input {
			theirs, *end.ours = w, r
		}
		end.set(theirs)
		p.child = append(p.child, theirs)
	}
	return p, nil
}

func (p *stdio) closeChildEnds() {
	for _, f := range p.child {
		_ = f.Close()
	}
}

func (p *stdio) close() {
	for _, f := range []*os.File{p.stdin, p.stdout, p.stderr} {
		if f != nil {
			_ = f.Close()
		}
	}
}
