package virtio

import (
	"encoding/binary"
	"errors"
	"fmt"

	"torpor/vmm/cow"
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

	blkQueueSize   = 128
	blkMaxSegments = blkQueueSize - 2 // the others are header and status
	blkMaxSegment  = 256 << 10        // bytes
	blkMaxBytes    = blkMaxSegments * blkMaxSegment
	blkMaxDiscard  = 1 << 20 // sectors, each of at most blkMaxRanges
	blkMaxRanges   = 16

	blkIDBytes = 20
)

// blkWorkers is how many requests are done at once, and blkBuffer what each works with, in bytes.
const (
	blkWorkers = 4
	blkBuffer  = 128 << 10
)

// Block is a disk (virtio 1.2, section 5.2). It does not own the chain.
type Block struct {
	disk     *cow.Chain
	id       [blkIDBytes]byte
	readOnly bool
	config   []byte

	features uint64
	server   *server // nil unless active
	paused   bool
}

var _ mmio.Device = (*Block)(nil)

// NewBlock returns the disk on chain, which must outlive it. id is what the guest is told as serial number: its first 20 bytes
// count. A chain without a writable top is read-only in any case.
func NewBlock(chain *cow.Chain, id string, readOnly bool) *Block {
	b := &Block{disk: chain, readOnly: readOnly || chain.ReadOnly()}
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
	f := blkSizeMax | blkSegMax | blkBlockSize | blkFlush | blkTopology
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
	b.server = startServer(queues[0], irq, b.paused, blkWorkers, blkBuffer, b.answer)
	return nil
}

// Notify implements mmio.Device.
func (b *Block) Notify(int) { b.server.kick() }

// Reset implements mmio.Device.
func (b *Block) Reset() {
	b.server.stop()
	b.server, b.features, b.paused = nil, 0, false
}

// Pause implements mmio.Device. All requests taken so far are answered when it returns.
func (b *Block) Pause() error {
	b.server.pause()
	return nil
}

// Resume implements mmio.Device.
func (b *Block) Resume() error {
	b.server.resume()
	return nil
}

// Save implements mmio.Device: all that matters is in the queue and on the disk, which it flushes.
func (b *Block) Save() ([]byte, error) {
	if err := b.disk.Flush(); err != nil {
		return nil, fmt.Errorf("save disk: %w", err)
	}
	return nil, nil
}

// Load implements mmio.Device.
func (b *Block) Load(state []byte) error {
	b.paused = true
	return loadEmpty(state)
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
