// Package ratelimit bounds how many operations and bytes a second a device does for its guest, with two token buckets.
//
// A bucket holds at most its size, is full at first, and fills from empty within its refill time; a one-time burst comes on
// top and is used up first. An operation larger than a bucket is let through when the bucket is full and leaves a debt, which
// is paid off before the next: so nothing is too large to be done, and over time no more passes than the rate allows.
//
// There is no goroutine: tokens are counted when they are asked for, and who must wait sets a timer. The clock is injected.
// It is the guest's own: it stands still from Pause to Resume, and what a snapshot keeps of a limiter goes on where it
// stopped, however late it is restored. The package is a leaf.
package ratelimit

import (
	"errors"
	"fmt"
	"sync"
	"time"
)

// ErrLimit is wrapped by every error about a Limit.
var ErrLimit = errors.New("bad rate limit")

// Bounds of a bucket: they keep the arithmetic away from overflow.
const (
	MaxTokens = 1 << 48
	MaxRefill = 24 * time.Hour
)

// Bucket describes a token bucket. The rate is Size per Refill.
type Bucket struct {
	Size   uint64        // tokens of a full bucket, at most MaxTokens; 0: unlimited
	Burst  uint64        // tokens beyond Size, there once and never filled up again; at most MaxTokens
	Refill time.Duration // from empty to full, at most MaxRefill
}

// Limit describes a Limiter. The zero value limits nothing.
type Limit struct {
	Ops   Bucket // operations
	Bytes Bucket // bytes moved
}

// Unlimited reports whether nothing is limited.
func (l Limit) Unlimited() bool { return l.Ops.Size == 0 && l.Bytes.Size == 0 }

// Validate reports all faults together.
func (l Limit) Validate() error { return errors.Join(l.Ops.validate("ops"), l.Bytes.validate("bytes")) }

func (b Bucket) validate(name string) error {
	switch {
	case b.Size == 0 && b != (Bucket{}):
		return fmt.Errorf("%w: %s: a burst or a refill time, but no size", ErrLimit, name)
	case b.Size == 0:
		return nil
	case b.Size > MaxTokens || b.Burst > MaxTokens:
		return fmt.Errorf("%w: %s: more than %d tokens", ErrLimit, name, uint64(MaxTokens))
	case b.Refill <= 0 || b.Refill > MaxRefill:
		return fmt.Errorf("%w: %s: a refill time of %v, want up to %v", ErrLimit, name, b.Refill, MaxRefill)
	}
	return nil
}

// Clock is the time a Limiter lives in.
type Clock interface {
	// Now is a time that never goes back, since some moment.
	Now() time.Duration
	// AfterFunc calls f once, on a goroutine of its own, after d. stop keeps it from being called, if it is not too late.
	AfterFunc(d time.Duration, f func()) (stop func())
}

// Limiter is a pair of buckets. It is safe for concurrent use. A nil Limiter limits nothing.
type Limiter struct {
	clock Clock

	// mu guards all below.
	mu     sync.Mutex
	ops    bucket
	bytes  bucket
	last   time.Duration // when the tokens were counted
	paused bool
}

// New returns a limiter with full buckets, nil if limit limits nothing.
func New(limit Limit, clock Clock) (*Limiter, error) {
	if err := limit.Validate(); err != nil {
		return nil, err
	}
	if limit.Unlimited() {
		return nil, nil
	}
	return &Limiter{clock: clock, ops: newBucket(limit.Ops), bytes: newBucket(limit.Bytes), last: clock.Now()}, nil
}

// Take takes the tokens for one operation of n bytes and returns 0, or takes nothing and returns how long it is until they
// are there, if nobody else takes any. It never blocks. n beyond MaxTokens counts as MaxTokens.
func (l *Limiter) Take(n uint64) time.Duration {
	if l == nil {
		return 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.countLocked()
	n = min(n, MaxTokens)
	if wait := max(l.ops.wait(1), l.bytes.wait(n)); wait > 0 {
		return wait
	}
	l.ops.take(1)
	l.bytes.take(n)
	return 0
}

// After calls f once, on a goroutine of its own, when d, an answer of Take, is over: it is time to ask again. stop cancels
// that, if it is not too late.
func (l *Limiter) After(d time.Duration, f func()) (stop func()) { return l.clock.AfterFunc(d, f) }

// Pause stops the limiter's time, for a guest whose time stands still.
func (l *Limiter) Pause() {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.countLocked()
	l.paused = true
}

// Resume lets the limiter's time go on from where it stopped.
func (l *Limiter) Resume() {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.countLocked()
	l.paused = false
}

// countLocked adds what came in since the last time.
func (l *Limiter) countLocked() {
	now := l.clock.Now()
	if !l.paused && now > l.last {
		l.ops.fill(now - l.last)
		l.bytes.fill(now - l.last)
	}
	l.last = now
}
