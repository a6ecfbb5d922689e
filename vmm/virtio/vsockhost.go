package virtio

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
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

// vsockLimits bound what is waited for.
type vsockLimits struct {
	line    time.Duration // for a client to say where it wants to go
	request time.Duration // for the guest to answer a connection request
	// settle is how long the guest may wait to hear that its packets were taken, if nothing else is to be told to it meanwhile: it
	// only wants their memory back.
	settle time.Duration
}

var vsockDefaultLimits = vsockLimits{line: 10 * time.Second, request: time.Minute, settle: 4 * time.Millisecond}

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
	if v.closed || len(v.all) >= vsockMaxConns {
		sock.Close()
		return
	}
	c := v.newConnLocked(sock)
	v.tasks.Go(func() { v.serveHost(c) })
}

// serveHost does the whole of a connection of a client.
func (v *Vsock) serveHost(c *vsockConn) {
	err := c.sock.SetReadDeadline(time.Now().Add(v.limits.line))
	order, rest, lineErr := readOrder(c.sock)
	err = errors.Join(err, lineErr, c.sock.SetReadDeadline(time.Time{}))
	switch {
	case err != nil:
	case order.listen && v.park(c, order.port):
		v.relay(c, rest)
		return
	case !order.listen && v.request(c, order.port):
		impatience := time.AfterFunc(v.limits.request, func() { v.giveUp(c) })
		defer impatience.Stop()
		v.relay(c, rest)
		return
	}
	v.finish(c)
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

// park keeps c for a connection that the guest makes to a port of the host. What the client says meanwhile is kept for the guest;
// a client that has said something is not seen to hang up.
func (v *Vsock) park(c *vsockConn, port uint32) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if c.dead || len(v.parked) >= vsockMaxParked {
		return false
	}
	c.parked, c.key.host = true, port
	c.greeting = []byte("OK\n")
	v.parked = append(v.parked, c)
	return true
}

// unparkLocked takes c out of those that wait for the guest.
func (v *Vsock) unparkLocked(c *vsockConn) {
	c.parked = false
	v.parked = slices.DeleteFunc(v.parked, func(p *vsockConn) bool { return p == c })
}

// acceptGuestLocked makes the connection that the guest asks for, with the client that waits for it the longest.
func (v *Vsock) acceptGuestLocked(key vsockKey, h vsockHeader) {
	i := slices.IndexFunc(v.parked, func(c *vsockConn) bool { return c.key.host == key.host })
	if v.closed || i < 0 {
		v.replyResetLocked(key, h)
		return
	}
	c := v.parked[i]
	v.unparkLocked(c)
	v.enterLocked(c, key)
	c.peerAlloc, c.peerFwd = h.bufAlloc, h.fwdCnt
	c.established, c.oweResponse = true, true
	c.change.Broadcast()
	v.readyLocked(c)
}

// vsockOrder is the first line of a client.
type vsockOrder struct {
	listen bool // else connect
	port   uint32
}

// readOrder reads the first line and returns also what came after it.
func readOrder(r io.Reader) (order vsockOrder, rest []byte, err error) {
	buf := make([]byte, 0, 512)
	for {
		n, err := r.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		if end := bytes.IndexByte(buf, '\n'); end >= 0 && end < vsockLineBytes {
			order, err := parseOrder(string(buf[:end]))
			return order, buf[end+1:], err
		}
		if err != nil {
			return order, nil, err
		}
		if len(buf) >= vsockLineBytes {
			return order, nil, errors.New("first line is too long")
		}
	}
}

func parseOrder(line string) (vsockOrder, error) {
	verb, digits, _ := strings.Cut(line, " ")
	if verb != "CONNECT" && verb != "LISTEN" {
		return vsockOrder{}, errors.New("first line is neither CONNECT <port> nor LISTEN <port>")
	}
	port, err := strconv.ParseUint(digits, 10, 32)
	return vsockOrder{verb == "LISTEN", uint32(port)}, err
}
