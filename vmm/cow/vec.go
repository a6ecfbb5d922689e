package cow

import "sync"

// vec is bytes scattered over buffers.
type vec [][]byte

func (v vec) bytes() int64 {
	var n int64
	for _, b := range v {
		n += int64(len(b))
	}
	return n
}

// drop returns v without its first n bytes, and without the empty buffers it then begins with. It uses v up.
func (v vec) drop(n int64) vec {
	for len(v) > 0 && int64(len(v[0])) <= n {
		n -= int64(len(v[0]))
		v = v[1:]
	}
	if n > 0 && len(v) > 0 {
		v[0] = v[0][n:]
	}
	return v
}

// cutter hands out a vec piece by piece without copying it: the buffer that a piece ends within is cut short until the next
// piece is asked for. It uses the vec up.
type cutter struct {
	left vec
	rest []byte // of left[0], which the last piece ended within; nil if it did not
}

// next returns the next n bytes, which there must be. The piece before is void then.
func (c *cutter) next(n int64) vec {
	if c.rest != nil {
		c.left[0], c.rest = c.rest, nil
	}
	for i, b := range c.left {
		if n == 0 {
			piece := c.left[:i]
			c.left = c.left[i:]
			return piece
		}
		if int64(len(b)) > n {
			piece := c.left[:i+1]
			c.left = c.left[i:]
			c.left[0], c.rest = b[:n], b[n:]
			return piece
		}
		n -= int64(len(b))
	}
	piece := c.left
	c.left = nil
	return piece
}

// blocks is some blocks of a disk that follow one another.
type blocks struct{ first, n int64 }

// exclusion keeps writes that touch the same blocks apart: one that touches part of a block writes the whole block, and must
// not undo another's bytes.
type exclusion struct {
	mu   sync.Mutex
	free *sync.Cond // something was taken out of held
	held []blocks   // of the writes under way; never many
}

func newExclusion() *exclusion {
	e := &exclusion{}
	e.free = sync.NewCond(&e.mu)
	return e
}

func (e *exclusion) lock(b blocks) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for e.overlaps(b) {
		e.free.Wait()
	}
	e.held = append(e.held, b)
}

func (e *exclusion) overlaps(b blocks) bool {
	for _, h := range e.held {
		if b.first < h.first+h.n && h.first < b.first+b.n {
			return true
		}
	}
	return false
}

func (e *exclusion) unlock(b blocks) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for i, h := range e.held {
		if h == b {
			last := len(e.held) - 1
			e.held[i] = e.held[last]
			e.held = e.held[:last]
			break
		}
	}
	e.free.Broadcast()
}

// end is the block after the last.
func (b blocks) end() int64 { return b.first + b.n }
