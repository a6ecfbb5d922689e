package control

import (
	"context"
	"fmt"
	"net"

	"github.com/mdlayher/vsock"
	"github.com/rs/zerolog"
	"golang.org/x/sys/unix"
)

// vsock ports: those the guest listens on, and the host's for the word that a cold boot is over.
const (
	PortControl   = 1024
	PortForward   = 1025
	PortDataPlane = 49983
	portHello     = 1024
)

// Listen opens a vsock port of the guest, for the host only.
func Listen(port uint32, log zerolog.Logger) (net.Listener, error) {
	l, err := vsock.ListenContextID(unix.VMADDR_CID_ANY, port, nil)
	if err != nil {
		return nil, fmt.Errorf("listening on vsock port %d: %w", port, err)
	}
	return &hostOnly{l, log}, nil
}

// hostOnly drops connections of any peer but the host. It is used by pointer: ttrpc keeps listeners as map keys.
type hostOnly struct {
	net.Listener
	log zerolog.Logger
}

func (l *hostOnly) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if peer, ok := c.RemoteAddr().(*vsock.Addr); ok && peer.ContextID == vsock.Host {
			return c, nil
		}
		l.log.Warn().Stringer("peer", c.RemoteAddr()).Msg("refused a vsock connection that is not the host's")
		_ = c.Close() // never used
	}
}

// Hello tells the host that this boot is over: everything listens. A host that does not listen is an error.
func Hello(ctx context.Context) error {
	boot, err := BootID()
	if err != nil {
		return err
	}
	c, err := vsock.DialContext(ctx, vsock.Host, portHello, nil)
	if err != nil {
		return fmt.Errorf("telling the host that the guest is up: %w", err)
	}
	_, err = fmt.Fprintf(c, "hello %s\n", boot)
	if closeErr := c.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return fmt.Errorf("telling the host that the guest is up: %w", err)
	}
	return nil
}
