package hostvm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"time"

	"torpor/tools/hostvm/wire"
)

// execSilence is how long the exec server may say nothing (it speaks every 2 s) before the console is asked whether the
// machine is frozen.
const execSilence = 20 * time.Second

// Exec runs a shell command as root in the machine and answers its exit status (128+n if signal n ended it). A nil stdin
// is an empty one. When ctx ends the command's process group is killed and ctx's error returned; what the command put
// into a session of its own lives on. ErrDown if the machine is not running, ErrFrozen if nothing in it moves.
//
// If stdin blocks in Read (a terminal) a goroutine stays in that Read after the command has ended.
func (i *Instance) Exec(ctx context.Context, shell string, stdin io.Reader, stdout, stderr io.Writer) (exitCode int, err error) {
	st, _, err := i.running()
	if err != nil {
		return 0, err
	}
	conn, err := dialExec(ctx, loopback(st.ExecPort))
	if err != nil {
		return 0, i.lost(ctx, err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	if err := wire.WriteJSON(conn, wire.Start, wire.Command{Token: st.Token, Shell: shell, Now: time.Now().UnixNano()}); err != nil {
		return 0, i.lost(ctx, err)
	}
	go sendInput(conn, stdin) // ends with the connection, or with stdin

	r := &patientReader{conn: conn, frozen: i.frozen}
	for {
		f, err := wire.Read(r)
		if err != nil {
			return 0, i.lost(ctx, err)
		}
		switch f.Type {
		case wire.Stdout:
			_, err = stdout.Write(f.Payload)
		case wire.Stderr:
			_, err = stderr.Write(f.Payload)
		case wire.Exit:
			var res wire.Result
			if err := f.Decode(&res); err != nil {
				return 0, err
			}
			if res.Error != "" {
				return 0, fmt.Errorf("instance %s could not run the command: %s", i.name, res.Error)
			}
			return res.Code, nil
		case wire.Start, wire.Stdin, wire.Alive:
		}
		if err != nil {
			return 0, fmt.Errorf("pass on the command's output: %w", err)
		}
	}
}

const (
	dialBudget = 20 * time.Second       // for the exec server to greet
	dialPause  = 100 * time.Millisecond // between two tries
)

// dialExec connects to the exec server. QEMU accepts connections for the machine with the shortest of queues and drops
// some when many come at once; one that broke before the greeting reached nobody, so it is tried again.
func dialExec(ctx context.Context, addr string) (net.Conn, error) {
	pause := time.NewTicker(dialPause)
	defer pause.Stop()
	for deadline := time.Now().Add(dialBudget); ; {
		conn, err := greeted(ctx, addr, deadline)
		if err == nil || time.Now().After(deadline) {
			return conn, err
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-pause.C:
		}
	}
}

func greeted(ctx context.Context, addr string, deadline time.Time) (net.Conn, error) {
	d := net.Dialer{Deadline: deadline}
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	if err = conn.SetReadDeadline(deadline); err == nil {
		_, err = wire.Read(conn)
	}
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return conn, nil
}

// lost says why the connection broke: the caller's doing, the machine's end, or else.
func (i *Instance) lost(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if errors.Is(err, ErrFrozen) {
		return err
	}
	if _, _, down := i.running(); down != nil {
		return down
	}
	if i.frozen() {
		return ErrFrozen
	}
	return fmt.Errorf("exec connection to instance %s: %w", i.name, err)
}

// sendInput copies stdin into frames and ends with the empty one.
func sendInput(conn net.Conn, stdin io.Reader) {
	if stdin != nil {
		buf := make([]byte, wire.MaxPayload/2)
		for {
			n, err := stdin.Read(buf)
			if n > 0 && wire.Write(conn, wire.Stdin, buf[:n]) != nil {
				return
			}
			if err != nil {
				break
			}
		}
	}
	_ = wire.Write(conn, wire.Stdin, nil) // if the connection is gone the reader of frames says so
}

// patientReader reads from a connection that is never silent for long unless the other side is stuck; then it asks
// whether to wait on.
type patientReader struct {
	conn   net.Conn
	frozen func() bool
}

func (r *patientReader) Read(p []byte) (int, error) {
	for {
		if err := r.conn.SetReadDeadline(time.Now().Add(execSilence)); err != nil {
			return 0, err
		}
		n, err := r.conn.Read(p)
		if n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
		if r.frozen() {
			return 0, ErrFrozen
		}
	}
}

func (i *Instance) frozen() bool {
	d, err := quiet(i.Console(), time.Now())
	return err == nil && d > frozenAfter
}

// Push copies a local file into the machine, with its permission bits. The file there is replaced in one step, so that a
// program can be replaced while it runs.
func (i *Instance) Push(ctx context.Context, local, remote string) error {
	f, err := os.Open(local)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	to := shellQuote(remote)
	cmd := fmt.Sprintf(`mkdir -p "$(dirname %s)" && cat >%s.new && chmod %o %s.new && mv %s.new %s`, to, to, st.Mode().Perm(), to, to, to)
	return i.transfer(ctx, "push to "+remote, cmd, f, io.Discard)
}

// Pull copies a file of the machine to a local one, which is made or overwritten.
func (i *Instance) Pull(ctx context.Context, remote, local string) error {
	f, err := os.Create(local)
	if err != nil {
		return err
	}
	err = i.transfer(ctx, "pull "+remote, "cat "+shellQuote(remote), nil, f)
	return errors.Join(err, f.Close())
}

func (i *Instance) transfer(ctx context.Context, what, cmd string, in io.Reader, out io.Writer) error {
	var complaint strings.Builder
	code, err := i.Exec(ctx, cmd, in, out, &complaint)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	if code != 0 {
		return fmt.Errorf("%s: %s", what, strings.TrimSpace(complaint.String()))
	}
	return nil
}

func shellQuote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
