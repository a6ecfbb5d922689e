package virtio

import "encoding/binary"

// vsockHeaderBytes is the size of struct virtio_vsock_hdr (virtio 1.2, section 5.10.6).
const vsockHeaderBytes = 44

// hostCID is the context id of the host.
const hostCID = 2

// vsockStream is the one socket type there is here.
const vsockStream = 1

// Packet operations.
const (
	vsockRequest       = 1
	vsockResponse      = 2
	vsockReset         = 3
	vsockShutdown      = 4
	vsockData          = 5
	vsockCreditUpdate  = 6
	vsockCreditRequest = 7
)

// Flags of a shutdown: what its sender will do no more.
const (
	vsockNoReceive = 1
	vsockNoSend    = 2
)

// vsockTransportReset is the event that ends all of the guest's connections.
const vsockTransportReset = 0

// vsockHeader is the header of a packet.
type vsockHeader struct {
	srcCID, dstCID   uint64
	srcPort, dstPort uint32
	len              uint32 // bytes of payload
	typ, op          uint16
	flags            uint32
	bufAlloc, fwdCnt uint32 // the sender's credit: the size of its buffer, the bytes that left it so far
}

func parseVsockHeader(b *[vsockHeaderBytes]byte) vsockHeader {
	le := binary.LittleEndian
	return vsockHeader{
		srcCID: le.Uint64(b[0:]), dstCID: le.Uint64(b[8:]),
		srcPort: le.Uint32(b[16:]), dstPort: le.Uint32(b[20:]),
		len: le.Uint32(b[24:]), typ: le.Uint16(b[28:]), op: le.Uint16(b[30:]), flags: le.Uint32(b[32:]),
		bufAlloc: le.Uint32(b[36:]), fwdCnt: le.Uint32(b[40:]),
	}
}

func (h vsockHeader) marshal() []byte {
	var b [vsockHeaderBytes]byte
	h.put(&b)
	return b[:]
}

func (h vsockHeader) put(b *[vsockHeaderBytes]byte) {
	le := binary.LittleEndian
	le.PutUint64(b[0:], h.srcCID)
	le.PutUint64(b[8:], h.dstCID)
	le.PutUint32(b[16:], h.srcPort)
	le.PutUint32(b[20:], h.dstPort)
	le.PutUint32(b[24:], h.len)
	le.PutUint16(b[28:], h.typ)
	le.PutUint16(b[30:], h.op)
	le.PutUint32(b[32:], h.flags)
	le.PutUint32(b[36:], h.bufAlloc)
	le.PutUint32(b[40:], h.fwdCnt)
}
