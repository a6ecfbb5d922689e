package virtio

import (
	"net"
	"sync"
	"syscall"

	"torpor/vmm/virtio/virtq"
)

const (
	// vsockLargeBuffer is how many bytes of the guest a connection holds for the host at most: the credit the guest has, which
	// it uses up only when the host does not read. As much as Linux gives a connection of its own.
	vsockLargeBuffer = 256 << 10
	// vsockSmallBuffer is that when vsockMaxLarge connections have a large one.
	vsockSmallBuffer = 64 << 10
	vsockMaxLarge    = 64
)

// vsockConn is one connection. The device's mutex guards all of it; only calls that wait for the socket are made without.
//
// Its bytes go straight between the socket and guest memory, whoever finds that they can: the one that serves the guest's
// notifications, or the connection's own goroutines. Of these, one waits until the socket can be read, one until it can be
// written and writes what it did not take at once. What is owed to the guest besides data are flags, so that it never takes
// more room.
//
// The socket is closed by its own goroutines alone, and never under the mutex: closing waits for those who read. Others shut
// it down.
type vsockConn struct {
	key    vsockKey
	sock   *net.UnixConn
	raw    syscall.RawConn
	change *sync.Cond // signalled when what the writer waits for may have come

	established bool
	parked      bool // waits in Vsock.parked for the guest to connect to key.host
	gone        bool // the guest does not know it, or no more; what it sent before may still be on its way to the host
	dead        bool // gone, and nothing moves any more
	relayed     bool // the goroutines have ended
	queued      bool // is in Vsock.ready

	// To the guest. All counters of bytes wrap.
	oweRequest, oweResponse, oweCredit bool
	chunk                              []byte // read from the host with its first line, not yet sent
	readable                           bool   // the socket may have more
	appetite                           int    // bytes to ask it for next
	hostDone, hostDoneSent             bool   // the host sends no more; the guest knows
	sent, peerAlloc, peerFwd           uint32
	asked                              bool // for credit, since there was none

	// From the guest.
	greeting            []byte // for the host, before anything of the guest; until the guest has answered if it is asked
	in                  []byte // not yet being written to the host
	writing             bool   // something is
	alloc               uint32 // size of the buffer
	shut                uint32 // flags of the guest's shutdowns
	received, forwarded uint32
	told                uint32 // forwarded, as the guest knows it
}

func (v *Vsock) newConnLocked(sock *net.UnixConn) *vsockConn {
	c := &vsockConn{sock: sock, gone: true, change: sync.NewCond(&v.mu), alloc: vsockSmallBuffer, appetite: vsockMinRead}
	if v.large < vsockMaxLarge {
		v.large++
		c.alloc = vsockLargeBuffer
	}
	c.raw, _ = sock.SyscallConn() // fails for a nil socket only
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
	c.stopReceiving()
	_ = c.sock.CloseWrite() // as CloseRead
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
	if _, held := v.all[c]; !held || !c.gone || !c.relayed {
		return
	}
	delete(v.all, c)
	if c.alloc == vsockLargeBuffer {
		v.large--
	}
}

// stopReceiving makes the host's bytes, those to come too, go nowhere: the guest takes no more. It wakes who waits for them.
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
		c.change.Broadcast()
	case vsockData:
		ok = ok && c.shut&vsockNoSend == 0 && v.takeLocked(c, h, chain)
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
	v.readyLocked(c)
}

// shutdownLocked notes what the guest will do no more. When that is everything, the guest waits for a reset as the last word.
func (v *Vsock) shutdownLocked(c *vsockConn, flags uint32) {
	c.shut |= flags & (vsockNoReceive | vsockNoSend)
	c.change.Broadcast()
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
	if c.readable && !c.hostDone {
		return c.established && c.shut&vsockNoReceive == 0 && (c.credit() > 0 || !c.asked)
	}
	return c.established && c.hostDone && !c.hostDoneSent
}

// nextLocked completes the header of the next packet and returns its payload, of at most room bytes.
// Preconditions: owesLocked.
func (c *vsockConn) nextLocked(h *vsockHeader, room uint64) []byte {
	c.addressLocked(h)
	switch {
	case c.oweRequest:
		c.oweRequest, h.op = false, vsockRequest
	case c.oweResponse:
		c.oweResponse, h.op = false, vsockResponse
	case c.oweCredit:
		c.oweCredit, h.op = false, vsockCreditUpdate
	case (len(c.chunk) > 0 || c.readable && !c.hostDone) && c.credit() == 0:
		c.asked, h.op = true, vsockCreditRequest
	case len(c.chunk) > 0:
		n := uint32(min(uint64(len(c.chunk)), uint64(c.credit()), room))
		payload := c.chunk[:n]
		c.chunk = c.chunk[n:]
		c.sent += n
		h.op, h.len = vsockData, n
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

// readHost waits for what the host sends, until that ends or nobody wants it.
func (v *Vsock) readHost(c *vsockConn, first []byte) {
	v.mu.Lock()
	c.chunk = first
	v.readyLocked(c)
	v.sendLocked()
	v.mu.Unlock()
	// Whoever reads to the end of what is there, this is woken by what comes next: the poller sees edges, and the call begins by
	// trying.
	err := c.raw.Read(func(fd uintptr) bool { return v.arrived(c, int(fd)) })
	// What the guest does not want is read all the same: a socket closed with bytes in it resets its peer, which would
	// then not see the orderly end of what the guest had to say.
	for buf := make([]byte, 512); err == nil; {
		_, err = c.sock.Read(buf)
	}
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
		out, c.in = c.in, nil
	}
}

// writeLocked writes to the socket, the lock released meanwhile, and gives the guest its credit back.
func (v *Vsock) writeLocked(c *vsockConn, p []byte) bool {
	greeting := c.greeting != nil
	c.writing = true
	v.mu.Unlock()
	_, err := c.sock.Write(p)
	v.mu.Lock()
	c.writing, c.greeting = false, nil
	if err != nil {
		v.abortLocked(c)
		return false
	}
	if greeting {
		return true
	}
	v.forwardedLocked(c, uint32(len(p)))
	v.sendLocked()
	return true
}

// forwardedLocked gives the guest credit back for n bytes, once it would run short of it.
func (v *Vsock) forwardedLocked(c *vsockConn, n uint32) {
	c.forwarded += n
	if c.forwarded-c.told >= c.alloc/4*3 {
		c.oweCredit = true
		v.readyLocked(c)
	}
}
