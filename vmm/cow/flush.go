package cow

import "fmt"

// Flush makes durable all that was written before it. When the host lost a write, every later Flush fails too: what was lost
// is unknown. Any other failure, such as a full disk, may be gone the next time.
func (c *Chain) Flush() error {
	if c.readOnly {
		return nil
	}
	c.flushing.Lock()
	defer c.flushing.Unlock()
	return c.flush()
}

// flush keeps the order FORMAT.md demands: the map on disk never speaks of data that is not. A map of more than a piece is
// written piece by piece, each after a sync of its own. Preconditions: flushing is locked.
func (c *Chain) flush() error {
	for page := int64(0); ; {
		pages, raw, next := c.takeDirty(page)
		page = next
		if err := c.sync(); err != nil {
			return err
		}
		if len(pages) == 0 {
			return nil
		}
		if err := c.writeMap(pages, raw); err != nil {
			c.giveBackDirty(pages)
			return fmt.Errorf("flush disk layer: %w", err)
		}
	}
}

func (c *Chain) sync() error {
	if c.failed == nil {
		if err := c.top.f.sync(); err != nil {
			c.failed = fmt.Errorf("flush disk layer: %w", err)
		}
	}
	return c.failed
}

// takeDirty calls pages of the map from one on clean, at most a piece of them, and returns their numbers, their bytes as they
// are now, and where to go on.
func (c *Chain) takeDirty(from int64) (pages []int64, raw []byte, next int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(raw) < mapPieceBytes {
		page, ok := c.top.m.takeDirty(from)
		if !ok {
			break
		}
		pages = append(pages, page)
		raw = c.top.m.appendPage(raw, page)
		from = page + 1
	}
	return pages, raw, from
}

// writeMap writes pages of the map, those that follow one another at once.
func (c *Chain) writeMap(pages []int64, raw []byte) error {
	for len(pages) > 0 {
		n := 1
		for n < len(pages) && pages[n] == pages[0]+int64(n) {
			n++
		}
		if _, err := c.top.f.WriteAt(raw[:n*BlockSize], headerBytes+pages[0]*BlockSize); err != nil {
			return err
		}
		pages, raw = pages[n:], raw[n*BlockSize:]
	}
	return nil
}

func (c *Chain) giveBackDirty(pages []int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, page := range pages {
		c.top.m.markDirty(page)
	}
}
