package guest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"
)

// The guest's ports.
const (
	EnvdPort    = 49983 // also the TCP port number users know it by
	controlPort = 1024
	forwardPort = 1025
)

// maxLine bounds the lines of the two little dial protocols.
const maxLine = 128

// ErrClosed says that the guest answered that nothing listens on the port.
var ErrClosed = errors.New("the port is closed inside the guest")

// Guest reaches one microVM. It holds nothing and is safe for concurrent use.
type Guest struct{ socket string }

// At returns the guest behind a hybrid vsock socket.
func At(vsockSocket string) *Guest { return &Guest{socket: vsockSocket} }

// Dial connects to a TCP port of the guest (to envd itself for its own). ErrClosed is wrapped when the guest refused.
func (g *Guest) Dial(ctx context.Context, port uint16) (net.Conn, error) {
	if port == EnvdPort {
		return g.dialVsock(ctx, EnvdPort)
	}
	conn, err := g.dialVsock(ctx, forwardPort)
	if err != nil {
		return nil, err
	}
	answer, err := exchange(ctx, conn, fmt.Sprintf("CONNECT %d\n", port))
	if err == nil {
		err = forwarded(answer)
	}
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("dial guest port %d: %w", port, err)
	}
	return conn, nil
}

// forwarded reads the forwarder's answer.
func forwarded(answer string) error {
	if answer == "OK" {
		return nil
	}
	reason, ok := strings.CutPrefix(answer, "ERR ")
	switch {
	case !ok:
		return fmt.Errorf("the forwarder answered %q", answer)
	case strings.HasPrefix(reason, "refused"):
		return ErrClosed
	default:
		return fmt.Errorf("the guest could not connect: %q", reason)
	}
}

// dialVsock connects to a vsock port of the guest.
func (g *Guest) dialVsock(ctx context.Context, port uint32) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", g.socket)
	if err != nil {
		return nil, fmt.Errorf("dial vsock port %d: %w", port, err)
	}
	answer, err := exchange(ctx, conn, fmt.Sprintf("CONNECT %d\n", port))
	if err == nil {
		err = accepted(answer)
	}
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("dial vsock port %d: %w", port, err)
	}
	return conn, nil
}

// accepted reads the VMM's answer: "OK <host port>".
func accepted(answer string) error {
	port, ok := strings.CutPrefix(answer, "OK ")
	if !ok {
		return fmt.Errorf("the VMM answered %q", answer)
	}
	if _, err := strconv.ParseUint(port, 10, 32); err != nil {
		return fmt.Errorf("the VMM answered %q", answer)
	}
	return nil
}

// exchange writes a line and reads one, within ctx. The connection has no deadline afterwards.
func exchange(ctx context.Context, conn net.Conn, line string) (string, error) {
	stop := context.AfterFunc(ctx, func() { cut(conn) })
	defer stop()
	if _, err := conn.Write([]byte(line)); err != nil {
		return "", cancelled(ctx, err)
	}
	answer, err := readLine(conn)
	if err != nil {
		return "", cancelled(ctx, err)
	}
	if !stop() {
		return "", ctx.Err()
	}
	return answer, nil
}

// cut ends every read and write of a connection or listener at once. That it is closed already is no matter.
func cut(c interface{ SetDeadline(time.Time) error }) { _ = c.SetDeadline(time.Unix(1, 0)) }

func cancelled(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// readLine reads up to the newline and not a byte further: what follows belongs to the user.
func readLine(conn net.Conn) (string, error) {
	var line [maxLine]byte
	for n := range line {
		if _, err := conn.Read(line[n : n+1]); err != nil {
			return "", err
		}
		if line[n] == '\n' {
			return string(line[:n]), nil
		}
	}
	return "", fmt.Errorf("a line of more than %d bytes", maxLine)
}
