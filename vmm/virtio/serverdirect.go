package virtio

import (
	"time"

	"torpor/vmm/virtio/virtq"
)

// lookoutPeriod is how long a request may keep the goroutine that gets the notifications before a worker looks for others.
const lookoutPeriod = 20 * time.Millisecond

// direct is what a server needs to answer requests on the goroutine that gets the notifications (mmio.Direct). Most requests come
// alone, the driver waits for just this one, and to wake a worker takes longer than what the worker then does.
type direct struct {
	serve func()                    // answers what a notification announces; of one goroutine, and not kept from one call to the next
	short func(c *virtq.Chain) bool // whether a request does not take long, as a rule
	chain virtq.Chain               // the request being answered

	// Guarded by the server's mu.
	busy    bool        // one is being answered
	did     bool        // one was answered since the last lookout
	lookout *time.Timer // runs while one of these is true
	looking bool        // the lookout runs
}

// startDirect comes before start.
func (s *server) startDirect(short func(c *virtq.Chain) bool) {
	s.mu.Lock() // against the first lookout
	defer s.mu.Unlock()
	s.direct = direct{serve: s.serve, short: short, lookout: time.AfterFunc(lookoutPeriod, s.lookOut), looking: true}
}

// serve answers requests when no worker does: the first that a notification announces, and those of the others that no worker has got
// hold of by then. When workers are at it, all is for them, so that somebody takes notifications.
func (s *server) serve() {
	for more := s.begin(); more; {
		written := s.answer(&s.direct.chain, nil)
		more = s.finish(written) && s.begin()
	}
}

// begin takes a request that serve answers, if there is one.
func (s *server) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kicked = true
	if s.closed || s.paused || s.held {
		return false
	}
	if s.busy > 0 {
		s.work.Signal()
		return false
	}
	d := &s.direct
	if !s.popLocked(&d.chain, d.short) {
		return false
	}
	if more, err := s.queue.More(); more || err != nil {
		s.work.Signal()
	}
	d.busy = true
	if !d.looking {
		d.looking = true
		d.lookout.Reset(lookoutPeriod)
	}
	return true
}

// finish gives the request back and reports whether there are more.
func (s *server) finish(written uint32) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.direct.busy, s.direct.did = false, true
	s.pushLocked(&s.direct.chain, written)
	s.awaitMoreLocked() // before the interrupt, after which there soon is one
	s.interruptLocked()
	return s.kicked
}

// lookOut has a worker look after the queue if serve may be stuck with a request: nobody takes notifications then.
func (s *server) lookOut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := &s.direct
	if d.busy {
		s.kicked = true
		s.work.Signal()
	}
	d.looking = !s.closed && (d.busy || d.did)
	d.did = false
	if d.looking {
		d.lookout.Reset(lookoutPeriod)
	}
}
