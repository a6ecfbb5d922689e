package virtio

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"
)

const (
	// vsockLineBytes is the longest first line of a client, line feed included.
	vsockLineBytes = 32
	// vsockAcceptPause is how long the listener rests when the process has no file descriptor to spare.
	vsockAcceptPause = 100 * time.Millisecond
)

// vsockLimits bound what a peer that does nothing can hold up.
type vsockLimits struct {
	line    time.Duration // for a client to say where it wants to go
	request time.Duration // for the guest to answer a connection request
}

var vsockDefaultLimits = vsockLimits{line: 10 * time.Second, request: time.Minute}

// accept serves the listener until Close.
func (v *Vsock) accept() {
	for {
		sock, err := v.listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			select {
			case <-time.After(vsockAcceptPause):
			case <-v.done:
			}
			continue
		}
		v.acceptHost(sock)
	}
}

func (v *Vsock) acceptHost(sock *net.UnixConn) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed || v.queues == nil || len(v.all) >= vsockMaxConns {
		sock.Close()
		return
	}
	c := v.newConnLocked(sock)
	v.tasks.Go(func() { v.serveHost(c) })
}

// serveHost does the whole of a connection that the host makes.
func (v *Vsock) serveHost(c *vsockConn) {
	err := c.sock.SetReadDeadline(time.Now().Add(v.limits.line))
	port, rest, lineErr := readConnect(c.sock)
	err = errors.Join(err, lineErr, c.sock.SetReadDeadline(time.Time{}))
	if err != nil || !v.request(c, port) {
		v.finish(c)
		return
	}
	impatience := time.AfterFunc(v.limits.request, func() { v.giveUp(c) })
	defer impatience.Stop()
	v.relay(c, rest)
}

// request asks the guest for a connection to one of its ports.
func (v *Vsock) request(c *vsockConn, port uint32) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if c.dead || v.queues == nil {
		return false
	}
	key := vsockKey{guest: port}
	for taken := true; taken; _, taken = v.conns[key] {
		key.host = vsockFirstPort + v.nextPort
		v.nextPort = (v.nextPort + 1) % vsockPorts
	}
	v.enterLocked(c, key)
	c.greeting = fmt.Appendf(nil, "OK %d\n", key.host)
	c.oweRequest = true
	v.readyLocked(c)
	v.sendLocked()
	return true
}

func (v *Vsock) giveUp(c *vsockConn) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !c.established && !c.dead {
		v.abortLocked(c)
	}
}

// readConnect reads "CONNECT <port>\n" and returns the port and what came after the line.
func readConnect(r io.Reader) (port uint32, rest []byte, err error) {
	buf := make([]byte, 0, 512)
	for {
		n, err := r.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		if end := bytes.IndexByte(buf, '\n'); end >= 0 && end < vsockLineBytes {
			port, err := parseConnect(string(buf[:end]))
			return port, buf[end+1:], err
		}
		if err != nil {
			return 0, nil, err
		}
		if len(buf) >= vsockLineBytes {
			return 0, nil, errors.New("first line is too long")
		}
	}
}

func parseConnect(line string) (uint32, error) {
	digits, ok := strings.CutPrefix(line, "CONNECT ")
	if !ok {
		return 0, errors.New("first line is not CONNECT <port>")
	}
	port, err := strconv.ParseUint(digits, 10, 32)
	return uint32(port), err
}

// acceptGuestLocked starts a connection that the guest asks for.
func (v *Vsock) acceptGuestLocked(key vsockKey, h vsockHeader) {
	if v.closed || len(v.all) >= vsockMaxConns {
		v.replyResetLocked(key, h)
		return
	}
	c := v.newConnLocked(nil)
	v.enterLocked(c, key)
	c.peerAlloc, c.peerFwd = h.bufAlloc, h.fwdCnt
	v.tasks.Go(func() { v.serveGuest(c) })
}

// serveGuest does the whole of a connection that the guest makes.
func (v *Vsock) serveGuest(c *vsockConn) {
	path := fmt.Sprintf("%s_%d", v.path, c.key.host)
	sock, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	if !v.dialled(c, sock, err) {
		v.finish(c)
		return
	}
	v.relay(c, nil)
}

// dialled tells the guest how its request ended, and reports whether there is a connection now.
func (v *Vsock) dialled(c *vsockConn, sock *net.UnixConn, err error) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if err != nil {
		v.abortLocked(c)
		return false
	}
	c.sock = sock
	if c.dead {
		return false // finish closes the socket
	}
	c.established, c.oweResponse = true, true
	v.readyLocked(c)
	v.sendLocked()
	return true
}
