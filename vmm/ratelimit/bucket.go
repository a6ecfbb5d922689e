package ratelimit

import (
	"math"
	"math/bits"
	"time"
)

// bucket is the tokens of one kind. With a size of 0 it lets everything through. Its arithmetic is exact: no fraction of a
// token is lost or made up, however often the tokens are counted.
type bucket struct {
	Bucket
	level int64  // tokens; negative: a debt
	part  uint64 // of the next token, in units of 1/Refill; less than Refill
	burst uint64 // what is left of Burst
}

func newBucket(b Bucket) bucket { return bucket{Bucket: b, level: int64(b.Size), burst: b.Burst} }

// need is what must be there before n tokens may be taken.
func (b *bucket) need(n uint64) uint64 { return min(n, b.Size) }

// have is what is there, 0 for a debt.
func (b *bucket) have() uint64 { return uint64(max(b.level+int64(b.burst), 0)) }

// wait returns how long it takes until n tokens may be taken, 0 if they may.
func (b *bucket) wait(n uint64) time.Duration {
	need := b.need(n)
	if b.have() >= need {
		return 0
	}
	// missing <= 2*MaxTokens: the answer fits whatever it is multiplied with.
	missing := uint64(int64(need) - b.level - int64(b.burst))
	hi, lo := bits.Mul64(missing, uint64(b.Refill))
	lo, borrow := bits.Sub64(lo, b.part, 0)
	hi -= borrow
	lo, carry := bits.Add64(lo, b.Size-1, 0) // round up
	hi += carry
	if hi >= b.Size {
		return math.MaxInt64
	}
	q, _ := bits.Div64(hi, lo, b.Size)
	return time.Duration(min(q, math.MaxInt64))
}

// take takes n tokens, of the burst first. What is not there becomes a debt.
func (b *bucket) take(n uint64) {
	if b.Size == 0 {
		return
	}
	once := min(n, b.burst)
	b.burst -= once
	b.level -= int64(n - once)
}

// fill adds the tokens of d.
func (b *bucket) fill(d time.Duration) {
	if b.Size == 0 {
		return
	}
	hi, lo := bits.Mul64(uint64(d), b.Size)
	lo, carry := bits.Add64(lo, b.part, 0)
	hi += carry
	room := uint64(int64(b.Size) - b.level)
	if hi < uint64(b.Refill) {
		if q, r := bits.Div64(hi, lo, uint64(b.Refill)); q < room {
			b.level, b.part = b.level+int64(q), r
			return
		}
	}
	b.level, b.part = int64(b.Size), 0 // full: what runs over is lost
}
