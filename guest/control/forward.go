package control

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/rs/zerolog"
)

const (
	// maxRequest bounds the first line of a forwarded connection, in bytes.
	maxRequest = 64
	// dialTimeout bounds connecting to a port of the guest, requestTimeout the wait for the first line.
	dialTimeout    = 10 * time.Second
	requestTimeout = 30 * time.Second
)

// Forwarder connects the host to TCP ports of the guest. A connection begins with the line "CONNECT <port>", answered by
// "OK" or "ERR <refused|timeout|other> <text>"; then bytes flow both ways, each until its own end.
type Forwarder struct{ Log zerolog.Logger }

// Serve forwards the connections of l until ctx ends, then breaks those that are open.
func (f Forwarder) Serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = l.Close() })() // only unblocks Accept
	var open sync.WaitGroup
	defer open.Wait()
	defer cancel()
	for {
		c, err := l.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("accepting a connection to forward: %w", err)
		}
		open.Go(func() {
			defer c.Close()
			if err := forward(ctx, c); err != nil {
				f.Log.Debug().Err(err).Msg("forwarding a connection")
			}
		})
	}
}

func forward(ctx context.Context, host net.Conn) error {
	_ = host.SetReadDeadline(time.Now().Add(requestTimeout)) // without one we just wait longer
	r := bufio.NewReaderSize(host, maxRequest)
	line, err := r.ReadSlice('\n')
	if err != nil {
		return fmt.Errorf("reading the request: %w", err)
	}
	port, err := parseRequest(string(line))
	if err != nil {
		_, err = fmt.Fprintf(host, "ERR other %v\n", err)
		return err
	}
	local, err := dialLocal(ctx, port)
	if err != nil {
		_, err = fmt.Fprintf(host, "ERR %s %v\n", reason(err), err)
		return err
	}
	defer local.Close()
	if _, err := io.WriteString(host, "OK\n"); err != nil {
		return fmt.Errorf("answering: %w", err)
	}
	_ = host.SetReadDeadline(time.Time{})
	return join(ctx, host, r, local)
}

// parseRequest reads "CONNECT <port>\n".
func parseRequest(line string) (uint16, error) {
	number, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "CONNECT ")
	if !ok {
		return 0, errors.New("the first line must be CONNECT <port>")
	}
	port, err := strconv.ParseUint(number, 10, 16)
	if err != nil || port == 0 {
		return 0, errors.New("a port is a number from 1 to 65535")
	}
	return uint16(port), nil
}

// dialLocal connects to a port of the guest, over IPv4 and, where nobody listens there, over IPv6.
func dialLocal(ctx context.Context, port uint16) (*net.TCPConn, error) {
	var first error
	d := net.Dialer{Timeout: dialTimeout}
	for _, host := range []string{"127.0.0.1", "::1"} {
		c, err := d.DialContext(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(int(port))))
		if err == nil {
			return c.(*net.TCPConn), nil
		}
		if first == nil {
			first = err
		}
	}
	return nil, first
}

// reason is the word of an ERR answer.
func reason(err error) string {
	var timeout net.Error
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused"
	case errors.As(err, &timeout) && timeout.Timeout():
		return "timeout"
	}
	return "other"
}

// halfCloser is a connection whose sending side can end alone; TCP, unix and vsock connections are.
type halfCloser interface {
	net.Conn
	CloseWrite() error
}

// join copies both ways until both have ended. A direction that ends is closed alone; one that breaks breaks both, and
// the end of ctx too.
func join(ctx context.Context, host net.Conn, fromHost io.Reader, local *net.TCPConn) error {
	sides, ok := host.(halfCloser)
	if !ok {
		return fmt.Errorf("a %T cannot be half closed", host)
	}
	breakBoth := func() {
		_ = local.SetLinger(0) // so that the peer sees a reset, not an end
		_ = local.Close()
		_ = host.Close()
	}
	defer context.AfterFunc(ctx, breakBoth)()
	var up sync.WaitGroup
	var upErr error
	up.Go(func() { upErr = pass(local, fromHost, breakBoth) })
	downErr := pass(sides, local, breakBoth)
	up.Wait()
	return errors.Join(upErr, downErr)
}

// pass copies one direction and closes its end.
func pass(to halfCloser, from io.Reader, breakBoth func()) error {
	_, err := io.Copy(to, from)
	if err == nil {
		err = to.CloseWrite()
	}
	if err != nil && !errors.Is(err, syscall.ENOTCONN) {
		breakBoth()
		if errors.Is(err, net.ErrClosed) || errors.Is(err, os.ErrClosed) {
			return nil // the other direction broke, and tells why
		}
		return err
	}
	return nil
}
