package guest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
)

// helloPort is the host port a booted guest connects to when its listeners are open.
const helloPort = 1024

// Hello waits for the first sign of life of a guest that boots.
type Hello struct {
	socket string
	conn   net.Conn // has asked for a connection of the guest
}

// ListenHello has the VMM keep a connection of the guest to the hello port for us. It must be called before the guest boots, and
// does not wait for the VMM, which answers when it has a machine.
func ListenHello(vsockSocket string) (*Hello, error) {
	h := &Hello{socket: vsockSocket}
	if err := h.listen(); err != nil {
		return nil, fmt.Errorf("listen for the guest's hello: %w", err)
	}
	return h, nil
}

// ListenHello is that of the package for this guest.
func (g *Guest) ListenHello() (*Hello, error) { return ListenHello(g.socket) }

func (h *Hello) listen() (err error) {
	if h.conn, err = net.Dial("unix", h.socket); err != nil {
		return err
	}
	_, err = fmt.Fprintf(h.conn, "LISTEN %d\n", helloPort) // into an empty buffer: it does not wait
	if err != nil {
		h.conn.Close()
	}
	return err
}

// Wait returns the boot id the guest said hello with. Connections of the guest that say anything else are dropped.
func (h *Hello) Wait(ctx context.Context) (string, error) {
	for {
		bootID, err := h.next(ctx)
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			return "", fmt.Errorf("wait for the guest's hello: %w", err)
		}
		if bootID != "" {
			return bootID, nil
		}
		h.conn.Close()
		if err := h.listen(); err != nil {
			return "", fmt.Errorf("wait for the guest's hello: %w", err)
		}
	}
}

// next reads what the next connection of the guest says; "" for anything but a hello.
func (h *Hello) next(ctx context.Context) (string, error) {
	conn := h.conn
	defer context.AfterFunc(ctx, func() { cut(conn) })()
	answer, err := readLine(conn)
	if err == nil && answer != "OK" {
		err = errors.New("it is no answer to LISTEN")
	}
	if err != nil {
		return "", fmt.Errorf("the VMM answered %q: %w", answer, err)
	}
	line, err := readLine(conn)
	bootID, ok := strings.CutPrefix(line, "hello ")
	if err != nil || !ok || !word(bootID) {
		return "", nil
	}
	return bootID, nil
}

// Close gives the port up.
func (h *Hello) Close() { h.conn.Close() }
