package virtio

import (
	"sync"

	"torpor/vmm/ratelimit"
	"torpor/vmm/virtio/mmio"
	"torpor/vmm/virtio/virtq"
)

// server answers the requests of one queue with a few goroutines, each request on its own: so requests are done in any order.
type server struct {
	// mu guards the queue and all below; work is signalled when there may be something for a worker, idle when nothing is being
	// answered.
	mu     sync.Mutex
	work   *sync.Cond
	idle   *sync.Cond
	queue  *virtq.Queue
	irq    mmio.Interrupt
	kicked bool // the queue may have requests
	paused bool
	closed bool
	busy   int // requests being answered

	answer func(c *virtq.Chain, buf []byte) uint32
	direct direct // of some servers

	// limit says when a request may be begun, and cost what it counts for, in bytes. While held, none may: unhold stops the
	// timer that ends this, and is nil before there was one.
	limit  *ratelimit.Limiter
	cost   func(c *virtq.Chain) uint64
	held   bool
	unhold func()

	workers sync.WaitGroup
}

// startServer starts n workers with a buffer of bufBytes each. answer does one request, without locks, with a worker's buffer
// to work in, and returns how many bytes of the writable part it wrote.
func startServer(queue *virtq.Queue, irq mmio.Interrupt, paused bool, n, bufBytes int, answer func(c *virtq.Chain, buf []byte) uint32) *server {
	s := &server{queue: queue, irq: irq, paused: paused}
	s.start(n, bufBytes, answer)
	return s
}

// start starts the workers; see startServer.
func (s *server) start(n, bufBytes int, answer func(c *virtq.Chain, buf []byte) uint32) {
	s.work, s.idle = sync.NewCond(&s.mu), sync.NewCond(&s.mu)
	s.kicked = true
	s.answer = answer
	for range n {
		s.workers.Go(func() {
			var c virtq.Chain
			buf := make([]byte, bufBytes)
			for s.take(&c) {
				s.give(&c, answer(&c, buf))
			}
		})
	}
}

// take waits for a request and returns it in c, or false when the server was closed.
func (s *server) take(c *virtq.Chain) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		switch {
		case s.closed:
			return false
		case s.paused || s.held || !s.kicked:
			s.work.Wait()
			continue
		}
		if s.popLocked(c, anyRequest) {
			s.awaitMoreLocked()
			return true
		}
	}
}

func anyRequest(*virtq.Chain) bool { return true }

// popLocked takes a request if there is one that may be begun now. If there is none at all, the driver was asked to notify; one that
// is not for the caller is for a worker.
func (s *server) popLocked(c *virtq.Chain, mine func(*virtq.Chain) bool) bool {
	ok, err := s.queue.Pop(c)
	if err != nil {
		s.breakLocked()
		return false
	}
	if !ok {
		s.awaitMoreLocked()
		return false
	}
	if !mine(c) {
		s.queue.Unpop(1)
		s.work.Signal()
		return false
	}
	if s.holdLocked(c) {
		return false
	}
	s.busy++
	return true
}

// awaitMoreLocked asks the driver to notify of the next request. If that is there already it is for another worker.
func (s *server) awaitMoreLocked() {
	var err error
	if s.kicked, err = s.queue.AwaitMore(); err != nil {
		s.breakLocked()
	}
	if s.kicked {
		s.work.Signal()
	}
}

func (s *server) breakLocked() {
	s.kicked = false
	s.irq.NeedsReset()
}

// holdLocked reports whether the limit forbids to begin the request in c, which goes back to the queue then: so a pause need
// not wait for it.
func (s *server) holdLocked(c *virtq.Chain) bool {
	if s.limit == nil {
		return false
	}
	wait := s.limit.Take(s.cost(c))
	if wait == 0 {
		return false
	}
	s.queue.Unpop(1)
	s.held = true
	s.unhold = s.limit.After(wait, s.endHold)
	return true
}

func (s *server) endHold() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held = false
	s.work.Signal()
}

func (s *server) give(c *virtq.Chain, written uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pushLocked(c, written)
	s.interruptLocked()
}

func (s *server) pushLocked(c *virtq.Chain, written uint32) {
	s.busy--
	if s.busy == 0 {
		s.idle.Broadcast()
	}
	if err := s.queue.Push(c.Head, written); err != nil {
		s.irq.NeedsReset()
	}
}

func (s *server) interruptLocked() {
	if s.queue.NeedsInterrupt() {
		s.irq.Used()
	}
}

func (s *server) kick() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kicked = true
	s.work.Signal()
}

// pause returns when no request is being answered and none will be taken.
func (s *server) pause() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.paused = true
	for s.busy > 0 {
		s.idle.Wait()
	}
}

func (s *server) resume() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.paused = false
	s.work.Broadcast()
}

// stop waits for what is being answered and ends the workers.
func (s *server) stop() {
	s.mu.Lock()
	s.closed = true
	if s.direct.lookout != nil {
		s.direct.lookout.Stop() // one that runs out all the same finds the server closed
	}
	if s.unhold != nil {
		s.unhold()
	}
	s.work.Broadcast()
	for s.busy > 0 { // not all of it is the workers'
		s.idle.Wait()
	}
	s.mu.Unlock()
	s.workers.Wait()
}
