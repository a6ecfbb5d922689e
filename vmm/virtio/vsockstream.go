package virtio

import (
	"errors"
	"slices"

	"golang.org/x/sys/unix"

	"torpor/vmm/virtio/virtq"
)

const (
	// vsockMinRead and vsockMaxRead bound how many bytes a socket is asked for at once. Between them it is as it was the last
	// time: to take more buffers from the guest than get filled costs more than a second call.
	vsockMinRead = 4 << 10
	vsockMaxRead = 256 << 10
	// vsockMaxBatch is how many buffers of the guest are filled at once.
	vsockMaxBatch = 64
)

// vsockBatch is what one transfer between a socket and guest memory works with.
type vsockBatch struct {
	chains [vsockMaxBatch]virtq.Chain
	rooms  [vsockMaxBatch]uint32 // bytes of payload that they take
	used   []virtq.Used
	pieces [][]byte
	iov    []unix.Iovec
	header [vsockHeaderBytes]byte
}

// addressLocked completes a header with all that packets of c have in common.
func (c *vsockConn) addressLocked(h *vsockHeader) {
	h.srcPort, h.dstPort = c.key.host, c.key.guest
	h.bufAlloc, h.fwdCnt = c.alloc, c.forwarded
	c.told = c.forwarded
}

// takeLocked sends the payload of a data packet to the host, if the guest had the credit to send it. What the socket does not take at
// once is kept for the writer.
func (v *Vsock) takeLocked(c *vsockConn, h vsockHeader, chain *virtq.Chain) bool {
	if free := c.alloc - (c.received - c.forwarded); h.len > free || uint64(h.len) > chain.ReadLen()-vsockHeaderBytes {
		return false
	}
	c.received += h.len
	done := 0
	if c.greeting == nil && !c.writing && len(c.in) == 0 && h.len > 0 {
		var err error
		if done, err = v.writeNowLocked(c, chain, int(h.len)); err != nil {
			return false
		}
		v.forwardedLocked(c, uint32(done))
	}
	rest := int(h.len) - done
	if rest == 0 {
		return true
	}
	old := len(c.in)
	c.in = slices.Grow(c.in, rest)[:old+rest]
	if chain.ReadAt(c.in[old:], vsockHeaderBytes+uint64(done)) != nil {
		c.in = c.in[:old]
		return false
	}
	c.change.Broadcast()
	return true
}

// writeNowLocked writes the first n bytes behind a packet's header to the socket, as far as that takes them without waiting.
func (v *Vsock) writeNowLocked(c *vsockConn, chain *virtq.Chain, n int) (done int, err error) {
	b := &v.batch
	if b.pieces, err = chain.AppendReadable(b.pieces[:0], vsockHeaderBytes); err != nil {
		return 0, err
	}
	b.iov = b.iov[:0]
	for _, p := range b.pieces {
		if n == 0 {
			break
		}
		p = p[:min(len(p), n)]
		n -= len(p)
		b.iov = appendIovec(b.iov, p)
	}
	cerr := c.raw.Control(func(fd uintptr) { done, err = writev(int(fd), b.iov) })
	if again(err) {
		err = nil
	}
	return done, errors.Join(cerr, err)
}

// arrived is called when the socket may have bytes, or its end, and reports true when nobody wants to know any more.
func (v *Vsock) arrived(c *vsockConn, fd int) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if c.parked && !c.dead {
		// A client that hangs up before it has a connection wants none. What it says is for later.
		if n, err := peek(fd); n == 0 && !again(err) {
			v.abortLocked(c)
		}
	}
	c.readable = true
	v.readyLocked(c)
	v.sendLocked()
	return c.dead || c.hostDone || c.shut&vsockNoReceive != 0
}

// streamsLocked reports whether what c owes is what its socket has. Preconditions: owesLocked.
func (c *vsockConn) streamsLocked() bool {
	return !c.oweRequest && !c.oweResponse && len(c.chunk) == 0 && c.readable && !c.hostDone && c.credit() > 0
}

// streamLocked reads what the socket has straight into buffers of the guest. It reports false if the guest has none.
// Preconditions: c is the first in line, and streamsLocked.
func (v *Vsock) streamLocked(c *vsockConn) (bool, error) {
	q, b := v.queues[vsockRX], &v.batch
	asked := min(c.appetite, int(c.credit()))
	popped, err := v.gatherLocked(asked)
	if popped == 0 || err != nil {
		return false, err
	}
	var n int
	cerr := c.raw.Control(func(fd uintptr) { n, err = readv(int(fd), b.iov) })
	if err = errors.Join(cerr, err); errors.Is(err, unix.EFAULT) {
		n, err = 0, nil // a bad page: the guest gets its buffers back as they are
		v.sent = true
		for i := range popped {
			if err := q.Push(b.chains[i].Head, 0); err != nil {
				return false, err
			}
		}
		return true, nil
	}
	if n > 0 {
		v.ready[0].queued = false
		v.ready = v.ready[1:]
		v.readyLocked(c) // at the end of the line
		c.appetite = max(vsockMinRead, n)
		if n == asked {
			c.appetite = min(2*n, vsockMaxRead)
		}
		return true, v.deliverLocked(c, popped, uint32(n))
	}
	q.Unpop(uint16(popped))
	switch {
	case again(err):
		c.readable = false
	case err == nil:
		c.hostDone = true
		_ = c.sock.CloseRead() // wakes readHost
	default:
		v.rsts = append(v.rsts, vsockReply{c.key, vsockStream})
		v.killLocked(c)
	}
	return true, nil
}

// gatherLocked takes buffers of the guest for n bytes of payload, as far as there are some, and makes the batch of them. Buffers that
// are of no use go back.
func (v *Vsock) gatherLocked(n int) (popped int, err error) {
	q, b := v.queues[vsockRX], &v.batch
	b.iov = b.iov[:0]
	for n > 0 && popped < vsockMaxBatch && len(b.iov) < vsockQueueSize {
		chain := &b.chains[popped]
		ok, err := q.Pop(chain)
		if !ok || err != nil {
			return popped, err
		}
		pieces, err := chain.AppendWritable(b.pieces[:0], vsockHeaderBytes)
		b.pieces = pieces
		if err != nil || len(pieces) == 0 {
			if popped > 0 { // they go back in order
				q.Unpop(1)
				return popped, nil
			}
			v.sent = true
			if err := q.Push(chain.Head, 0); err != nil {
				return 0, err
			}
			continue
		}
		room := 0
		for _, p := range pieces {
			if p = p[:min(len(p), n-room)]; len(p) > 0 {
				b.iov = appendIovec(b.iov, p)
				room += len(p)
			}
		}
		n -= room
		b.rooms[popped] = uint32(room)
		popped++
	}
	return popped, nil
}

// deliverLocked gives the guest the n bytes that were read into a batch.
func (v *Vsock) deliverLocked(c *vsockConn, popped int, n uint32) error {
	q, b := v.queues[vsockRX], &v.batch
	h := vsockHeader{srcCID: hostCID, dstCID: v.cid, typ: vsockStream, op: vsockData}
	c.addressLocked(&h)
	c.oweCredit = false
	c.sent += n
	b.used = b.used[:0]
	for i := 0; n > 0; i++ {
		h.len = min(n, b.rooms[i])
		n -= h.len
		u := virtq.Used{Head: b.chains[i].Head, Written: vsockHeaderBytes + h.len}
		h.put(&b.header)
		if b.chains[i].WriteAt(b.header[:], 0) != nil {
			u.Written = 0 // the guest gave a bad address: the packet is lost to it
		}
		b.used = append(b.used, u)
	}
	q.Unpop(uint16(popped - len(b.used)))
	v.sent = true
	return q.PushAll(b.used...)
}
