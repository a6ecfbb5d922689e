package guest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strings"
)

// helloPort is the host port a booted guest connects to when its listeners are open.
const helloPort = 1024

// Hello waits for the first sign of life of a guest that boots.
type Hello struct{ l *net.UnixListener }

// ListenHello opens the host side of the hello port. It must be open before the guest boots.
func ListenHello(vsockSocket string) (*Hello, error) {
	path := fmt.Sprintf("%s_%d", vsockSocket, helloPort)
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("listen for the guest's hello: %w", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen for the guest's hello: %w", err)
	}
	return &Hello{l}, nil
}

// Wait returns the boot id the guest said hello with. Connections that say anything else are dropped.
func (h *Hello) Wait(ctx context.Context) (string, error) {
	defer context.AfterFunc(ctx, func() { cut(h.l) })()
	for {
		conn, err := h.l.Accept()
		if ctx.Err() != nil {
			if err == nil {
				conn.Close()
			}
			return "", fmt.Errorf("wait for the guest's hello: %w", context.Cause(ctx))
		}
		if err != nil {
			return "", fmt.Errorf("wait for the guest's hello: %w", err)
		}
		line, err := readHello(ctx, conn)
		if err != nil {
			continue
		}
		if bootID, ok := strings.CutPrefix(line, "hello "); ok && word(bootID) {
			return bootID, nil
		}
	}
}

func readHello(ctx context.Context, conn net.Conn) (string, error) {
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { cut(conn) })()
	return readLine(conn)
}

// Close closes the port.
func (h *Hello) Close() { h.l.Close() }
