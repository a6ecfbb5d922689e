// Package cow is the copy-on-write disk of a sandbox: a raw base that many share, read-only layers over it, and a writable
// layer on top. FORMAT.md is the byte-level contract of a layer and says why a crash leaves it whole.
//
// A Chain is safe for concurrent use; so are Inspect, Verify and Merge beside chains that read the same layers. One process at
// a time may have a layer as its top. Memory: a quarter byte for each block of 4 KiB and each layer. The package is a leaf.
package cow

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
)

// ErrReadOnly is the answer to a write to a chain without a writable top.
var ErrReadOnly = errors.New("disk is read-only")

// ErrOutOfRange is the answer to an access that is not within the disk.
var ErrOutOfRange = errors.New("access past the end of the disk")

// Chain is an open disk.
type Chain struct {
	size   int64
	base   *os.File // nil: zeros
	layers []*layer // oldest first; the top, if any, is the last

	// mu guards the top: its map, and what its data area holds. The layers below never change.
	mu  sync.RWMutex
	top *layer // nil: read-only

	// flushing makes flushes queue up. Lock order: flushing, mu.
	flushing sync.Mutex
	// failed is the first failed fdatasync. The kernel reports a lost write once; whoever asks later must hear of it too.
	failed error
}

// OpenChain opens a disk: base is a raw image ("" for zeros), layers are read-only and oldest first, top is the layer that
// takes the writes ("" for a read-only disk). All layers must be of one virtual size, at least the base's.
func OpenChain(base string, layers []string, top string) (_ *Chain, err error) {
	c := &Chain{}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("open disk: %w", err), c.Close())
		}
	}()
	var baseSize int64
	if base != "" {
		if c.base, err = os.Open(base); err != nil {
			return nil, err
		}
		if baseSize, err = c.base.Seek(0, io.SeekEnd); err != nil {
			return nil, err
		}
		c.size = baseSize
	}
	for _, path := range layers {
		if err = c.addLayer(path, false); err != nil {
			return nil, err
		}
	}
	if top != "" {
		if err = c.addLayer(top, true); err != nil {
			return nil, err
		}
		c.top = c.layers[len(c.layers)-1]
	}
	if c.size == 0 || c.size < baseSize {
		return nil, fmt.Errorf("the disk has %d bytes, its base %d", c.size, baseSize)
	}
	return c, nil
}

func (c *Chain) addLayer(path string, writable bool) error {
	l, err := openLayer(path, writable)
	if err != nil {
		return err
	}
	c.layers = append(c.layers, l)
	if first := c.layers[0]; l.virtualSize != first.virtualSize {
		return fmt.Errorf("%s is for a disk of %d bytes, %s for one of %d", l.path, l.virtualSize, first.path, first.virtualSize)
	}
	c.size = l.virtualSize
	return nil
}

// Size returns the size of the disk in bytes.
func (c *Chain) Size() int64 { return c.size }

// ReadOnly reports whether the disk has no writable top.
func (c *Chain) ReadOnly() bool { return c.top == nil }

// Close closes the files. It does not flush.
func (c *Chain) Close() error {
	var errs []error
	for _, l := range c.layers {
		errs = append(errs, l.f.Close())
	}
	if c.base != nil {
		errs = append(errs, c.base.Close())
	}
	return errors.Join(errs...)
}

// ReadAt fills p from the disk at off, at any alignment.
func (c *Chain) ReadAt(p []byte, off int64) (int, error) {
	if err := c.check(off, int64(len(p))); err != nil {
		return 0, err
	}
	c.mu.RLock()
	defer c.mu.RUnlock()
	return len(p), c.readLocked(p, off)
}

func (c *Chain) check(off, n int64) error {
	if off < 0 || n < 0 || off > c.size || n > c.size-off {
		return ErrOutOfRange
	}
	return nil
}

func (c *Chain) readLocked(p []byte, off int64) error {
	for len(p) > 0 {
		first := off / BlockSize
		last := (off + int64(len(p)) - 1) / BlockSize
		from, s, blocks := c.find(first, last-first+1)
		n := min(int64(len(p)), (first+blocks)*BlockSize-off)
		var err error
		switch {
		case from != nil && s == data:
			err = from.readAt(p[:n], off)
		case from != nil:
			clear(p[:n])
		default:
			err = c.readBase(p[:n], off)
		}
		if err != nil {
			return err
		}
		p, off = p[n:], off+n
	}
	return nil
}

// find returns the newest layer that has block b and what it is there, nil if none has it, and how many blocks from b on, at
// most limit, are found in the same place.
func (c *Chain) find(b, limit int64) (*layer, blockState, int64) {
	for i := len(c.layers) - 1; i >= 0; i-- {
		s, n := c.layers[i].m.run(b, limit)
		limit = n
		if s != absent {
			return c.layers[i], s, n
		}
	}
	return nil, absent, limit
}

func (c *Chain) readBase(p []byte, off int64) error {
	n := 0
	if c.base != nil {
		var err error
		if n, err = c.base.ReadAt(p, off); err != nil && !errors.Is(err, io.EOF) {
			return fmt.Errorf("read disk base: %w", err)
		}
	}
	clear(p[n:])
	return nil
}

// WriteAt writes p to the disk at off, at any alignment. It is durable after Flush.
func (c *Chain) WriteAt(p []byte, off int64) (int, error) {
	if err := c.checkWrite(off, int64(len(p))); err != nil {
		return 0, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	done := 0
	for done < len(p) {
		n, err := c.writePieceLocked(p[done:], off+int64(done))
		if err != nil {
			return done, err
		}
		done += n
	}
	return done, nil
}

func (c *Chain) checkWrite(off, n int64) error {
	if c.top == nil {
		return ErrReadOnly
	}
	return c.check(off, n)
}

// writePieceLocked writes the whole blocks p begins with, or else the part of a block it begins with.
func (c *Chain) writePieceLocked(p []byte, off int64) (int, error) {
	b, within := off/BlockSize, off%BlockSize
	if whole := int64(len(p)) / BlockSize; within == 0 && whole > 0 {
		n := whole * BlockSize
		if err := c.top.writeAt(p[:n], off); err != nil {
			return 0, err
		}
		c.top.m.set(b, whole, data)
		return int(n), nil
	}
	n := min(int64(len(p)), BlockSize-within)
	if c.top.m.get(b) == data {
		return int(n), c.top.writeAt(p[:n], off)
	}
	var block [BlockSize]byte
	if err := c.readLocked(block[:], b*BlockSize); err != nil {
		return 0, err
	}
	copy(block[within:], p[:n])
	if err := c.top.writeAt(block[:], b*BlockSize); err != nil {
		return 0, err
	}
	c.top.m.set(b, 1, data)
	return int(n), nil
}

// Discard makes n bytes at off read as zeros and gives their room back, whole blocks of it. Durable after Flush.
func (c *Chain) Discard(off, n int64) error {
	if err := c.checkWrite(off, n); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for n > 0 {
		b, within := off/BlockSize, off%BlockSize
		piece := min(n, BlockSize-within)
		if within == 0 && n >= BlockSize {
			blocks := n / BlockSize
			piece = blocks * BlockSize
			c.zeroLocked(b, blocks)
		} else if _, err := c.writePieceLocked(zeros[:piece], off); err != nil {
			return err
		}
		off, n = off+piece, n-piece
	}
	return nil
}

// zeroLocked gives n blocks from b on the state zero.
func (c *Chain) zeroLocked(b, n int64) {
	for end := b + n; b < end; {
		s, run := c.top.m.run(b, end-b)
		if s == data {
			c.top.punch(b, run)
		}
		c.top.m.set(b, run, zero)
		b += run
	}
}

// Flush makes durable all that was written before it. When the host lost a write, every later Flush fails too: what was lost
// is unknown. Any other failure, such as a full disk, may be gone the next time.
func (c *Chain) Flush() error {
	if c.top == nil {
		return nil
	}
	c.flushing.Lock()
	defer c.flushing.Unlock()
	if err := c.flush(); err != nil {
		return fmt.Errorf("flush disk layer: %w", err)
	}
	return nil
}

// flush keeps the order FORMAT.md demands: the map on disk never speaks of data that is not.
// Preconditions: flushing is locked.
func (c *Chain) flush() error {
	changed := c.takeDirty()
	if err := c.sync(); err != nil {
		return err
	}
	if len(changed) == 0 {
		return nil
	}
	for i, raw := range changed {
		if _, err := c.top.f.WriteAt(raw, headerBytes+i*sectorBytes); err != nil {
			c.giveBackDirty(changed)
			return err
		}
	}
	return c.sync()
}

func (c *Chain) sync() error {
	if c.failed == nil {
		c.failed = c.top.f.sync()
	}
	return c.failed
}

// takeDirty returns the map sectors that differ from the file, as they are now, and calls them clean.
func (c *Chain) takeDirty() map[int64][]byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	changed := make(map[int64][]byte, len(c.top.m.dirty))
	for i := range c.top.m.dirty {
		changed[i] = c.top.m.sector(i)
	}
	clear(c.top.m.dirty)
	return changed
}

func (c *Chain) giveBackDirty(changed map[int64][]byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range changed {
		c.top.m.dirty[i] = struct{}{}
	}
}
