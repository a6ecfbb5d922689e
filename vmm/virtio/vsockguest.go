package virtio

import (
	"encoding/binary"

	"torpor/vmm/virtio/virtq"
)

const (
	// vsockTurn is how many packets of the guest are taken before others get the lock.
	vsockTurn = 64
	// vsockMaxReplies is how many resets may be owed for packets without a connection; beyond it the guest has to wait.
	vsockMaxReplies = 256
)

// transportReset follows the event that tells the guest that all its connections are gone.
type transportReset struct {
	owed    bool   // still to be put into the event queue
	awaited bool   // put there, and the guest has not given the buffer back
	seenIdx uint16 // the event queue's available index when it was put there
}

// owe demands the event, unless one is under way: its effect is yet to come.
func (r *transportReset) owe() { r.owed = !r.awaited }

// pending reports whether the guest may still hold old connections.
func (r *transportReset) pending() bool { return r.owed || r.awaited }

// serve does all there is to do for the guest.
func (v *Vsock) serve() {
	for again := true; again; {
		v.mu.Lock()
		again = v.serveLocked()
		v.mu.Unlock()
	}
}

// serveLocked does a part of what there is to do and reports whether there may be more.
func (v *Vsock) serveLocked() bool {
	if v.queues == nil || v.paused {
		return false
	}
	if err := v.eventsLocked(); err != nil {
		v.irq.NeedsReset()
		return false
	}
	again, err := v.receiveLocked()
	if err != nil {
		v.irq.NeedsReset()
		return false
	}
	v.sendLocked()
	v.tellTakenLocked()
	return again && len(v.rsts) < vsockMaxReplies
}

// tellTakenLocked sees to it that the guest learns of packets taken: now if they are many, else soon.
func (v *Vsock) tellTakenLocked() {
	switch {
	case v.untold == 0 || v.queues == nil:
	case v.untold >= vsockMaxUntold || v.limits.settle == 0:
		v.interruptLocked()
	case !v.settling:
		v.settling = true
		v.settle.Reset(v.limits.settle)
	}
}

func (v *Vsock) settled() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.settling = false
	if v.untold > 0 && !v.paused { // or it is interrupted when the device resumes
		v.interruptLocked()
	}
}

// interruptLocked interrupts the guest, which then looks into all queues: there is one interrupt for them.
func (v *Vsock) interruptLocked() {
	v.untold = 0
	v.irq.Used()
}

// eventsLocked sees to the event queue.
func (v *Vsock) eventsLocked() error {
	if v.reset.owed {
		if err := v.tellResetLocked(); err != nil {
			return err
		}
		v.interruptLocked()
	}
	if !v.reset.awaited {
		return nil
	}
	idx, err := v.queues[vsockEvent].AvailIdx()
	if err == nil && idx != v.reset.seenIdx {
		v.reset.awaited = false
	}
	return err
}

// tellResetLocked puts an owed TRANSPORT_RESET into the event queue, if the guest left a buffer there. It does not interrupt.
func (v *Vsock) tellResetLocked() error {
	q, c := v.queues[vsockEvent], &v.chains[vsockEvent]
	for v.reset.owed {
		ok, err := q.Pop(c)
		if err == nil && !ok {
			if ok, err = q.AwaitMore(); !ok || err != nil {
				return err
			}
			continue
		}
		if err != nil {
			return err
		}
		event := binary.LittleEndian.AppendUint32(nil, vsockTransportReset)
		if c.WriteAt(event, 0) != nil {
			if err := q.Push(c.Head, 0); err != nil {
				return err
			}
			continue
		}
		if err := q.Push(c.Head, uint32(len(event))); err != nil {
			return err
		}
		idx, err := q.AvailIdx()
		if err != nil {
			return err
		}
		v.reset = transportReset{awaited: true, seenIdx: idx}
		return q.NotifyAt(idx)
	}
	return nil
}

// receiveLocked takes packets from the guest and reports whether there may be more.
func (v *Vsock) receiveLocked() (bool, error) {
	q, c := v.queues[vsockTX], &v.chains[vsockTX]
	again := true
	for range vsockTurn {
		if len(v.rsts) >= vsockMaxReplies {
			break
		}
		ok, err := q.Pop(c)
		if err == nil && !ok {
			again, err = q.AwaitMore()
		}
		if err != nil {
			return false, err
		}
		if !ok {
			break
		}
		v.takePacketLocked(c)
		if err := q.Push(c.Head, 0); err != nil {
			return false, err
		}
		if v.untold > 0 || q.NeedsInterrupt() {
			v.untold++
		}
	}
	return again, nil
}

// takePacketLocked takes one packet of the guest. The header is read once: the guest may change its memory meanwhile.
func (v *Vsock) takePacketLocked(c *virtq.Chain) {
	var raw [vsockHeaderBytes]byte
	if c.ReadAt(raw[:], 0) != nil {
		return // not a packet; there is nobody to answer
	}
	h := parseVsockHeader(&raw)
	key := vsockKey{host: h.dstPort, guest: h.srcPort}
	if h.srcCID != v.cid || h.dstCID != hostCID || h.typ != vsockStream {
		v.replyResetLocked(key, h)
		return
	}
	conn := v.conns[key]
	switch {
	case conn == nil && h.op == vsockRequest:
		v.acceptGuestLocked(key, h)
	case conn == nil:
		v.replyResetLocked(key, h)
	default:
		v.packetLocked(conn, h, c)
	}
}

// replyResetLocked owes the guest a reset in answer to a packet that belongs to no connection, itself no reset.
func (v *Vsock) replyResetLocked(key vsockKey, h vsockHeader) {
	if h.op != vsockReset {
		v.rsts = append(v.rsts, vsockReply{key, h.typ})
	}
}

// readyLocked puts c in line for sendLocked, if the guest knows it.
func (v *Vsock) readyLocked(c *vsockConn) {
	if !c.queued && !c.gone {
		c.queued = true
		v.ready = append(v.ready, c)
	}
}

// sendLocked gives the guest the packets it is owed, as far as it has room for them.
func (v *Vsock) sendLocked() {
	if v.queues == nil || v.paused || v.reset.pending() {
		return
	}
	q := v.queues[vsockRX]
	for v.owesLocked() {
		var (
			ok  bool
			err error
		)
		if len(v.rsts) == 0 && v.ready[0].streamsLocked() {
			ok, err = v.streamLocked(v.ready[0])
		} else {
			ok, err = v.sendOneLocked()
		}
		if err == nil && !ok {
			if ok, err = q.AwaitMore(); err == nil && ok {
				continue
			}
		}
		if err != nil {
			v.irq.NeedsReset()
			return
		}
		if !ok {
			break
		}
	}
	if v.sent && q.NeedsInterrupt() {
		v.interruptLocked()
	}
	v.sent = false
}

// owesLocked reports whether there is a packet to send. If so, it is in rsts or from the first in line.
func (v *Vsock) owesLocked() bool {
	if len(v.rsts) > 0 {
		return true
	}
	for len(v.ready) > 0 {
		if v.ready[0].owesLocked() {
			return true
		}
		v.ready[0].queued = false
		v.ready = v.ready[1:]
	}
	return false
}

// sendOneLocked gives the guest the next packet. It reports false if the guest has no room for it.
// Preconditions: owesLocked.
func (v *Vsock) sendOneLocked() (bool, error) {
	q, c := v.queues[vsockRX], &v.chains[vsockRX]
	if ok, err := q.Pop(c); !ok || err != nil {
		return false, err
	}
	v.sent = true
	return true, q.Push(c.Head, v.fillLocked(c))
}

// fillLocked writes the next packet into a buffer of the guest and returns its size; 0 if the buffer is of no use.
// Preconditions: owesLocked.
func (v *Vsock) fillLocked(c *virtq.Chain) uint32 {
	if c.WriteLen() < vsockHeaderBytes {
		return 0
	}
	var (
		h       = vsockHeader{srcCID: hostCID, dstCID: v.cid, typ: vsockStream}
		payload []byte
	)
	if len(v.rsts) > 0 {
		r := v.rsts[0]
		v.rsts = v.rsts[1:]
		h.srcPort, h.dstPort, h.typ, h.op = r.host, r.guest, r.typ, vsockReset
	} else {
		conn := v.ready[0]
		v.ready = v.ready[1:]
		conn.queued = false
		payload = conn.nextLocked(&h, c.WriteLen()-vsockHeaderBytes)
		v.readyLocked(conn) // at the end of the line
	}
	h.put(&v.batch.header)
	if c.WriteAt(v.batch.header[:], 0) != nil || c.WriteAt(payload, vsockHeaderBytes) != nil {
		return 0 // the guest gave a bad address: the packet is lost to it
	}
	return vsockHeaderBytes + uint32(len(payload))
}
