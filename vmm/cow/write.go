package cow

import (
	"errors"
	"fmt"
	"os"
)

// WriteAt writes p to the disk at off, at any alignment. It is durable after Flush.
func (c *Chain) WriteAt(p []byte, off int64) (int, error) {
	if err := c.WriteV([][]byte{p}, off); err != nil {
		return 0, err
	}
	return len(p), nil
}

// WriteV writes bufs to the disk at off, at any alignment, and uses up the slice bufs; only the kernel reads the buffers. It is
// durable after Flush. After an error the bytes it would have written are any mixture of old and new.
func (c *Chain) WriteV(bufs [][]byte, off int64) error {
	n := vec(bufs).bytes()
	span, err := c.begin(off, n)
	if err != nil || n == 0 {
		return err
	}
	defer c.writing.unlock(span)
	// A block that the top does not have yet is written whole: what the request lacks of it comes from below.
	before, after := off%BlockSize, span.end()*BlockSize-off-n
	if before > 0 && c.inTop(span.first) {
		before = 0
	}
	if after > 0 && c.inTop(span.end()-1) {
		after = 0
	}
	if before > 0 || after > 0 {
		if bufs, err = c.complete(bufs, span, before, after); err != nil {
			return err
		}
	}
	if err := c.top.writev(bufs, off-before); err != nil {
		return err
	}
	c.mark(span, data)
	return nil
}

// begin checks a write of n bytes at off and locks the blocks it touches; none if there are no bytes.
func (c *Chain) begin(off, n int64) (blocks, error) {
	if c.readOnly {
		return blocks{}, ErrReadOnly
	}
	if err := c.check(off, n); err != nil || n == 0 {
		return blocks{}, err
	}
	first := off / BlockSize
	span := blocks{first, (off+n-1)/BlockSize - first + 1}
	c.writing.lock(span)
	return span, nil
}

// complete returns bufs with the before bytes that the first block begins with, and the after bytes that the last ends with.
// Preconditions: span is locked.
func (c *Chain) complete(bufs [][]byte, span blocks, before, after int64) ([][]byte, error) {
	edges := make([]byte, before+after)
	first, last := edges[:before], edges[before:]
	if _, err := c.ReadAt(first, span.first*BlockSize); err != nil {
		return nil, err
	}
	if _, err := c.ReadAt(last, span.end()*BlockSize-after); err != nil {
		return nil, err
	}
	all := append(make([][]byte, 0, len(bufs)+2), first)
	return append(append(all, bufs...), last), nil
}

// inTop reports whether block b is data of the top.
func (c *Chain) inTop(b int64) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.top.m.get(b) == data
}

// mark gives the blocks of span, which is locked, a state in the top. Most writes go to blocks that have it already, and do
// without keeping readers out.
func (c *Chain) mark(span blocks, s blockState) {
	c.mu.RLock()
	got, run := c.top.m.run(span.first, span.n)
	c.mu.RUnlock()
	if got == s && run == span.n {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.top.m.set(span.first, span.n, s)
}

// Discard makes n bytes at off read as zeros and gives their room back, whole blocks of it. Durable after Flush.
func (c *Chain) Discard(off, n int64) error { return c.zero(off, n, true) }

// Zero makes n bytes at off read as zeros and keeps the room that blocks have, so that writing them again cannot fail for the
// lack of it. Durable after Flush.
func (c *Chain) Zero(off, n int64) error { return c.zero(off, n, false) }

func (c *Chain) zero(off, n int64, release bool) error {
	if c.readOnly {
		return ErrReadOnly
	}
	if err := c.check(off, n); err != nil {
		return err
	}
	whole := blocks{first: (off + BlockSize - 1) / BlockSize}
	whole.n = (off+n)/BlockSize - whole.first
	if whole.n <= 0 { // within one block, or two
		return c.writeZeros(off, n)
	}
	if err := c.writeZeros(off, whole.first*BlockSize-off); err != nil {
		return err
	}
	c.zeroBlocks(whole, release)
	return c.writeZeros(whole.end()*BlockSize, off+n-whole.end()*BlockSize)
}

// writeZeros writes n zeros, less than two blocks.
func (c *Chain) writeZeros(off, n int64) error {
	first := min(n, BlockSize)
	return c.WriteV([][]byte{zeros[:first], zeros[:n-first]}, off)
}

func (c *Chain) zeroBlocks(span blocks, release bool) {
	c.writing.lock(span)
	defer c.writing.unlock(span)
	c.mark(span, zero)
	if release {
		c.top.punch(span.first, span.n)
	}
}

// Next is an empty layer that is ready to become a disk's top.
type Next struct{ l *layer }

// Close closes the layer's file, if no disk has taken it.
func (n *Next) Close() error { return n.l.f.Close() }

// Ready makes the empty layer in top ready for FreezeWith, and durable. It takes the file over and closes it if it fails.
func (c *Chain) Ready(top *os.File) (_ *Next, err error) {
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("freeze disk: %w", err), top.Close())
		}
	}()
	if c.readOnly {
		return nil, ErrReadOnly
	}
	next, err := loadTop(top.Name(), file{top})
	if err != nil {
		return nil, err
	}
	if err := c.ready(next); err != nil {
		return nil, err
	}
	return &Next{next}, nil
}

func (c *Chain) ready(next *layer) error {
	if next.virtualSize != c.size {
		return fmt.Errorf("%s is for a disk of %d bytes, this one has %d", next.path, next.virtualSize, c.size)
	}
	if next.m.count(absent) != next.blocks() {
		return fmt.Errorf("%s is not empty", next.path)
	}
	// It must be a layer after a crash too: its header is durable before anything depends on it.
	return next.f.sync()
}

// Freeze takes a snapshot of the disk, in a time that does not depend on what it holds: it flushes the top, which no chain
// writes any more then, and puts the empty layer in top over it. It takes the file over and closes it if it fails; the disk is
// as before then. Whoever keeps the list of layers must have recorded the new one: what is written from now on is in there.
func (c *Chain) Freeze(top *os.File) error {
	next, err := c.Ready(top)
	if err != nil {
		return err
	}
	if err := c.Flush(); err != nil { // most of it while writes go on
		return errors.Join(fmt.Errorf("freeze disk: %w", err), next.Close())
	}
	return c.FreezeWith(next)
}

// FreezeWith is the part of Freeze that keeps writes waiting. It takes a layer of Ready's over and closes it if it fails. Who
// has flushed the disk just before waits for little.
func (c *Chain) FreezeWith(next *Next) error {
	if err := c.freeze(next.l); err != nil {
		return errors.Join(fmt.Errorf("freeze disk: %w", err), next.Close())
	}
	return nil
}

func (c *Chain) freeze(next *layer) error {
	c.flushing.Lock()
	defer c.flushing.Unlock()
	whole := blocks{0, c.size / BlockSize}
	c.writing.lock(whole)
	defer c.writing.unlock(whole)
	if err := c.flush(); err != nil {
		return err
	}
	if err := c.top.f.unlock(); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.layers = append(c.layers[:len(c.layers):len(c.layers)], next)
	c.top = next
	return nil
}
