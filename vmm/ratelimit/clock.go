package ratelimit

import "time"

// system is the host's monotonic clock.
type system struct{ start time.Time }

// System returns the host's clock.
func System() Clock { return system{time.Now()} }

// Now implements Clock.
func (s system) Now() time.Duration { return time.Since(s.start) }

// AfterFunc implements Clock.
func (s system) AfterFunc(d time.Duration, f func()) (stop func()) {
	t := time.AfterFunc(d, f)
	return func() { t.Stop() }
}
