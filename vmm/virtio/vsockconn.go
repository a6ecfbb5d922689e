package virtio

import (
	"errors"
	"io"
	"net"
	"slices"
	"sync"

	"torpor/vmm/virtio/virtq"
)

const (
	// vsockBuffer is how many bytes of the guest a connection holds for the host at most: the credit the guest has.
	vsockBuffer = 64 << 10
	// vsockChunk is how many bytes of the host a connection holds for the guest at most.
	vsockChunk = 16 << 10
)

// vsockConn is one connection. The device's mutex guards all of it; only the socket's own calls are made without.
//
// Two goroutines move its bytes: one reads the socket and waits until the guest took what it read, one writes to the socket
// what the guest sent. What is owed to the guest besides data are flags, so that it never takes more room.
type vsockConn struct {
	key    vsockKey
	sock   *net.UnixConn
	change *sync.Cond // signalled when what the goroutines wait for may have come

	established bool
	parked      bool // waits in Vsock.parked for the guest to connect to key.host
	gone        bool // the guest does not know it, or no more; what it sent before may still be on its way to the host
	dead        bool // gone, and nothing moves any more
	relayed     bool // the goroutines have ended
	queued      bool // is in Vsock.ready

	// To the guest. All counters of bytes wrap.
	oweRequest, oweResponse, oweCredit bool
	chunk                              []byte // read from the host, not yet sent
	hostDone, hostDoneSent             bool   // the host sends no more; the guest knows
	sent, peerAlloc, peerFwd           uint32
	asked                              bool // for credit, since there was none

	// From the guest.
	greeting            []byte // for the host, before anything of the guest; until the guest has answered if it is asked
	in                  []byte // not yet being written to the host
	shut                uint32 // flags of the guest's shutdowns
	received, forwarded uint32
	told                uint32 // forwarded, as the guest knows it
}

func (v *Vsock) newConnLocked(sock *net.UnixConn) *vsockConn {
	c := &vsockConn{sock: sock, gone: true, change: sync.NewCond(&v.mu)}
	v.all[c] = struct{}{}
	return c
}

// enterLocked makes c known under a key.
func (v *Vsock) enterLocked(c *vsockConn, key vsockKey) {
	c.key, c.gone = key, false
	v.conns[key] = c
}

// leaveLocked makes c unknown to the guest, now or, if it is parked, for ever. What the guest sent still goes to the host.
func (v *Vsock) leaveLocked(c *vsockConn) {
	switch {
	case c.parked:
		v.unparkLocked(c)
	case c.gone:
		return
	default:
		delete(v.conns, c.key)
		c.gone = true
	}
	c.stopReceiving()
	c.shut = vsockNoReceive | vsockNoSend
	c.change.Broadcast()
	v.releaseLocked(c)
}

// killLocked ends c at once, without a word to the guest.
func (v *Vsock) killLocked(c *vsockConn) {
	c.dead = true
	v.leaveLocked(c)
	c.sock.Close()
	c.change.Broadcast()
}

// abortLocked ends c at once and tells the guest.
func (v *Vsock) abortLocked(c *vsockConn) {
	if !c.gone && !c.oweRequest {
		v.rsts = append(v.rsts, vsockReply{c.key, vsockStream})
	}
	v.killLocked(c)
	v.sendLocked()
}

// releaseLocked forgets c once neither the guest nor a goroutine has it.
func (v *Vsock) releaseLocked(c *vsockConn) {
	if c.gone && c.relayed {
		delete(v.all, c)
	}
}

// stopReceiving makes the host's bytes, those to come too, go nowhere: the guest takes no more.
func (c *vsockConn) stopReceiving() {
	c.chunk = nil
	_ = c.sock.CloseRead() // fails if the peer is gone, which is as good
}

// packetLocked takes a packet of the guest for c.
func (v *Vsock) packetLocked(c *vsockConn, h vsockHeader, chain *virtq.Chain) {
	c.peerAlloc, c.peerFwd = h.bufAlloc, h.fwdCnt
	c.asked = c.asked && c.credit() == 0
	ok := c.established
	switch h.op {
	case vsockReset:
		if c.shut&vsockNoSend != 0 {
			v.leaveLocked(c) // it had sent all it wanted to
		} else {
			v.killLocked(c)
		}
		return
	case vsockResponse:
		ok = !c.established && len(c.greeting) > 0
		c.established = ok
	case vsockData:
		ok = ok && c.shut&vsockNoSend == 0 && c.takeLocked(h, chain)
	case vsockShutdown:
		if ok {
			v.shutdownLocked(c, h.flags)
		}
	case vsockCreditUpdate:
	case vsockCreditRequest:
		c.oweCredit = true
	default:
		ok = false
	}
	if !ok {
		v.abortLocked(c)
		return
	}
	c.change.Broadcast()
	v.readyLocked(c)
}

// takeLocked keeps the payload of a data packet, if the guest had the credit to send it.
func (c *vsockConn) takeLocked(h vsockHeader, chain *virtq.Chain) bool {
	if free := vsockBuffer - (c.received - c.forwarded); h.len > free || uint64(h.len) > chain.ReadLen()-vsockHeaderBytes {
		return false
	}
	old, n := len(c.in), int(h.len)
	c.in = slices.Grow(c.in, n)[:old+n]
	if chain.ReadAt(c.in[old:], vsockHeaderBytes) != nil {
		c.in = c.in[:old]
		return false
	}
	c.received += h.len
	return true
}

// shutdownLocked notes what the guest will do no more. When that is everything, the guest waits for a reset as the last word.
func (v *Vsock) shutdownLocked(c *vsockConn, flags uint32) {
	c.shut |= flags & (vsockNoReceive | vsockNoSend)
	if c.shut&vsockNoReceive != 0 {
		c.stopReceiving()
	}
	if c.shut == vsockNoReceive|vsockNoSend {
		v.rsts = append(v.rsts, vsockReply{c.key, vsockStream})
		v.leaveLocked(c)
	}
}

// credit returns how many bytes the guest has room for.
func (c *vsockConn) credit() uint32 {
	if used := c.sent - c.peerFwd; used < c.peerAlloc {
		return c.peerAlloc - used
	}
	return 0
}

// owesLocked reports whether there is a packet for the guest.
func (c *vsockConn) owesLocked() bool {
	if c.gone {
		return false
	}
	if c.oweRequest || c.oweResponse || c.oweCredit {
		return true
	}
	if len(c.chunk) > 0 {
		return c.established && (c.credit() > 0 || !c.asked)
	}
	return c.established && c.hostDone && !c.hostDoneSent
}

// nextLocked completes the header of the next packet and returns its payload, of at most room bytes.
// Preconditions: owesLocked.
func (c *vsockConn) nextLocked(h *vsockHeader, room uint64) []byte {
	h.srcPort, h.dstPort = c.key.host, c.key.guest
	h.bufAlloc, h.fwdCnt = vsockBuffer, c.forwarded
	c.told = c.forwarded
	switch {
	case c.oweRequest:
		c.oweRequest, h.op = false, vsockRequest
	case c.oweResponse:
		c.oweResponse, h.op = false, vsockResponse
	case c.oweCredit:
		c.oweCredit, h.op = false, vsockCreditUpdate
	case len(c.chunk) > 0 && c.credit() == 0:
		c.asked, h.op = true, vsockCreditRequest
	case len(c.chunk) > 0:
		n := uint32(min(uint64(len(c.chunk)), uint64(c.credit()), room))
		payload := c.chunk[:n]
		c.chunk = c.chunk[n:]
		c.sent += n
		h.op, h.len = vsockData, n
		c.change.Broadcast()
		return payload
	default:
		c.hostDoneSent = true
		h.op, h.flags = vsockShutdown, vsockNoSend
	}
	return nil
}

// relay moves the bytes of a connection until both directions have ended, then closes the socket. first are bytes that were
// read from it already.
func (v *Vsock) relay(c *vsockConn, first []byte) {
	var writer sync.WaitGroup
	writer.Go(func() { v.writeHost(c) })
	v.readHost(c, first)
	writer.Wait()
	v.finish(c)
}

func (v *Vsock) finish(c *vsockConn) {
	c.sock.Close()
	v.mu.Lock()
	defer v.mu.Unlock()
	c.relayed = true
	v.releaseLocked(c)
}

// readHost hands what the host sends to the guest, one chunk after the other.
func (v *Vsock) readHost(c *vsockConn, first []byte) {
	wanted := len(first) == 0 || v.offer(c, first)
	buf := make([]byte, vsockChunk)
	for {
		n, err := c.sock.Read(buf)
		if err != nil {
			v.hostEnded(c, err)
			return
		}
		// What the guest does not want is read all the same: a socket closed with bytes in it resets its peer, which would
		// then not see the orderly end of what the guest had to say.
		wanted = wanted && v.offer(c, buf[:n])
	}
}

// offer waits until the guest took all of p. False: it never will.
func (v *Vsock) offer(c *vsockConn, p []byte) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if c.shut&vsockNoReceive != 0 {
		return false
	}
	c.chunk = p
	v.readyLocked(c)
	v.sendLocked()
	for len(c.chunk) > 0 {
		c.change.Wait()
	}
	return c.shut&vsockNoReceive == 0
}

func (v *Vsock) hostEnded(c *vsockConn, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if c.parked || !errors.Is(err, io.EOF) { // a client that hangs up before it has a connection wants none
		v.abortLocked(c)
		return
	}
	c.hostDone = true
	v.readyLocked(c)
	v.sendLocked()
}

// writeHost hands what the guest sends to the host.
func (v *Vsock) writeHost(c *vsockConn) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for !c.established && !c.parked && !c.dead {
		c.change.Wait()
	}
	out := c.greeting
	for {
		if len(out) > 0 && !v.writeLocked(c, out) {
			return
		}
		for len(c.in) == 0 && !c.dead && c.shut&vsockNoSend == 0 {
			c.change.Wait()
		}
		if c.dead {
			return
		}
		if len(c.in) == 0 {
			_ = c.sock.CloseWrite() // fails if the peer is gone
			return
		}
		out, c.in = c.in, out[:0]
	}
}

// writeLocked writes to the socket, the lock released meanwhile, and gives the guest its credit back.
func (v *Vsock) writeLocked(c *vsockConn, p []byte) bool {
	greeting := c.greeting != nil
	c.greeting = nil
	v.mu.Unlock()
	_, err := c.sock.Write(p)
	v.mu.Lock()
	if err != nil {
		v.abortLocked(c)
		return false
	}
	if greeting {
		return true
	}
	c.forwarded += uint32(len(p))
	if c.forwarded-c.told >= vsockBuffer/2 {
		c.oweCredit = true
		v.readyLocked(c)
		v.sendLocked()
	}
	return true
}
