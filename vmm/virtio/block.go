package virtio

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"torpor/vmm/cow"
	"torpor/vmm/ratelimit"
	"torpor/vmm/virtio/mmio"
	"torpor/vmm/virtio/virtq"
)

// Features of a block device (virtio 1.2, section 5.2.3).
const (
	blkSizeMax     uint64 = 1 << 1
	blkSegMax      uint64 = 1 << 2
	blkReadOnly    uint64 = 1 << 5
	blkBlockSize   uint64 = 1 << 6
	blkFlush       uint64 = 1 << 9
	blkTopology    uint64 = 1 << 10
	blkDiscard     uint64 = 1 << 13
	blkWriteZeroes uint64 = 1 << 14
)

// Limits a driver is told and held to.
const (
	sectorBytes = 512

	blkQueueSize   = 256
	blkMaxSegments = blkQueueSize - 2 // with header and status, a chain as long as the queue
	blkMaxSegment  = 256 << 10        // bytes
	blkMaxBytes    = blkMaxSegments * blkMaxSegment
	blkMaxDiscard  = 1 << 20 // sectors, each of at most blkMaxRanges
	blkMaxRanges   = 16

	blkIDBytes = 20
)

// blkWorkers is how many requests are done at once; the others wait in the queue.
const blkWorkers = 4

// disk is what a Block needs of a cow.Chain.
type disk interface {
	Size() int64
	ReadV(bufs [][]byte, off int64, clear func([]byte) error) error
	WriteV(bufs [][]byte, off int64) error
	Discard(off, n int64) error
	Zero(off, n int64) error
	Flush() error
}

// Block is a disk (virtio 1.2, section 5.2). It does not own the chain.
//
// A request runs on a worker, as system calls on the pieces of guest memory it names: its data is never copied here. Requests
// are done in any order, as the specification lets us; a flush covers what was answered before it was made.
type Block struct {
	disk     disk
	id       [blkIDBytes]byte
	readOnly bool
	config   []byte
	limit    *ratelimit.Limiter // it outlives resets, or a guest could reset it away
	requests sync.Pool          // *blkRequest

	features uint64
	server   *server // nil unless active
	paused   bool
}

var (
	_ mmio.Device = (*Block)(nil)
	_ mmio.Copier = (*Block)(nil)
	_ mmio.Direct = (*Block)(nil)
)

// NewBlock returns the disk on chain, which must outlive it. id is what the guest is told as serial number: its first 20 bytes
// count. A chain without a writable top is read-only in any case. limit may be nil, and belongs to the disk from then on.
func NewBlock(chain *cow.Chain, id string, readOnly bool, limit *ratelimit.Limiter) *Block {
	b := &Block{disk: chain, readOnly: readOnly || chain.ReadOnly(), limit: limit}
	b.requests.New = func() any { return &blkRequest{pieces: make([][]byte, 0, blkMaxSegments)} }
	copy(b.id[:], id)
	b.config = b.makeConfig()
	return b
}

// makeConfig lays out struct virtio_blk_config (section 5.2.4).
func (b *Block) makeConfig() []byte {
	const cowSectors = cow.BlockSize / sectorBytes
	c := make([]byte, 60)
	le := binary.LittleEndian
	le.PutUint64(c[0:], uint64(b.disk.Size())/sectorBytes) // capacity
	le.PutUint32(c[8:], blkMaxSegment)                     // size_max
	le.PutUint32(c[12:], blkMaxSegments)                   // seg_max
	le.PutUint32(c[20:], sectorBytes)                      // blk_size
	c[24] = 3                                              // physical_block_exp: 2^3 sectors
	le.PutUint16(c[26:], cowSectors)                       // min_io_size
	le.PutUint16(c[34:], 1)                                // num_queues
	le.PutUint32(c[36:], blkMaxDiscard)                    // max_discard_sectors
	le.PutUint32(c[40:], blkMaxRanges)                     // max_discard_seg
	le.PutUint32(c[44:], cowSectors)                       // discard_sector_alignment
	le.PutUint32(c[48:], blkMaxDiscard)                    // max_write_zeroes_sectors
	le.PutUint32(c[52:], blkMaxRanges)                     // max_write_zeroes_seg
	c[56] = 1                                              // write_zeroes_may_unmap
	return c
}

// ID implements mmio.Device.
func (b *Block) ID() uint32 { return idBlock }

// Features implements mmio.Device.
func (b *Block) Features() uint64 {
	f := blkSizeMax | blkSegMax | blkBlockSize | blkFlush | blkTopology | mmio.FeatureIndirect
	if b.readOnly {
		return f | blkReadOnly
	}
	return f | blkDiscard | blkWriteZeroes
}

// QueueSizes implements mmio.Device.
func (b *Block) QueueSizes() []uint16 { return []uint16{blkQueueSize} }

// ReadConfig implements mmio.Device.
func (b *Block) ReadConfig(off uint64, p []byte) { readConfig(b.config, off, p) }

// WriteConfig implements mmio.Device: nothing can be written.
func (b *Block) WriteConfig(uint64, []byte) {}

// Activate implements mmio.Device.
func (b *Block) Activate(features uint64, queues []*virtq.Queue, irq mmio.Interrupt) error {
	b.features = features
	b.server = &server{queue: queues[0], irq: irq, paused: b.paused, limit: b.limit, cost: blkCost}
	b.server.startDirect(blkShort)
	b.server.start(blkWorkers, 0, func(c *virtq.Chain, _ []byte) uint32 { return b.answer(c) })
	return nil
}

// blkCost is how many bytes of data a request moves, whatever it is; one that is too large fails and moves less.
func blkCost(c *virtq.Chain) uint64 {
	n := max(c.ReadLen(), blkHeaderBytes) - blkHeaderBytes + max(c.WriteLen(), 1) - 1
	return min(n, blkMaxBytes)
}

// blkShort says of a request whether it does not take long: it reads or writes sectors. A flush waits for the disk below.
func blkShort(c *virtq.Chain) bool {
	n := blkCost(c)
	return n > 0 && n%sectorBytes == 0
}

// Notify implements mmio.Device.
func (b *Block) Notify(int) { b.server.kick() }

// Waits implements mmio.Direct: for the disk.
func (b *Block) Waits(int) bool { return true }

// Serve implements mmio.Direct.
func (b *Block) Serve(int) func() { return b.server.direct.serve }

// Reset implements mmio.Device.
func (b *Block) Reset() {
	b.server.stop()
	b.server, b.features, b.paused = nil, 0, false
	b.limit.Resume()
}

// Pause implements mmio.Device. All requests taken so far are answered when it returns.
func (b *Block) Pause() error {
	b.server.pause()
	b.limit.Pause()
	return nil
}

// Resume implements mmio.Device.
func (b *Block) Resume() error {
	b.limit.Resume()
	b.server.resume()
	return nil
}

// Save implements mmio.Device: all that matters is in the queue, on the disk, which it flushes, and in the limit.
func (b *Block) Save() ([]byte, error) {
	if err := b.disk.Flush(); err != nil {
		return nil, fmt.Errorf("save disk: %w", err)
	}
	return b.limit.Save(), nil
}

// Copy implements mmio.Copier: whoever takes a copy freezes the disk, which flushes it.
func (b *Block) Copy() ([]byte, error) { return b.limit.Save(), nil }

// Load implements mmio.Device. The limit may be another one than that of the device that was saved, or none.
func (b *Block) Load(state []byte) error {
	b.paused = true
	b.limit.Pause()
	return b.limit.Load(state)
}

// readConfig fills p from a configuration space.
func readConfig(config []byte, off uint64, p []byte) {
	if off < uint64(len(config)) {
		copy(p, config[off:])
	}
}

// loadEmpty is Load for a device without state of its own.
func loadEmpty(state []byte) error {
	if len(state) != 0 {
		return errors.New("unexpected state of the device")
	}
	return nil
}
