// Package virtio holds the devices a guest sees: block, net, rng, vsock and balloon. Each implements mmio.Device.
//
// Whatever the guest writes is hostile until checked: lengths are bounded, headers are copied before they are read, a request
// that makes no sense fails alone, and a queue that makes no sense makes its device ask for a reset. Work is done on the
// device's own goroutines, which end with Reset.
package virtio

import (
	"sync"

	"torpor/vmm/ratelimit"
	"torpor/vmm/virtio/mmio"
	"torpor/vmm/virtio/virtq"
)

// Device types (virtio 1.2, section 5).
const (
	idNet     = 1
	idBlock   = 2
	idRNG     = 4
	idBalloon = 5
	idVsock   = 19
)

// server answers the requests of one queue with a few goroutines, each request on its own: so requests are done in any order.
type server struct {
	// mu guards the queue and all below; work is signalled when any of it changes.
	mu     sync.Mutex
	work   *sync.Cond
	queue  *virtq.Queue
	irq    mmio.Interrupt
	kicked bool // the queue may have requests
	paused bool
	closed bool
	busy   int // requests being answered

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
	s.work = sync.NewCond(&s.mu)
	s.kicked = true
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
		ok, err := s.queue.Pop(c)
		if err == nil && !ok {
			s.kicked, err = s.queue.AwaitMore()
		}
		if err != nil {
			s.kicked = false
			s.irq.NeedsReset()
		}
		if ok && s.holdLocked(c) {
			continue
		}
		if ok {
			s.busy++
			s.work.Signal() // there may be one more for another worker
			return true
		}
	}
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
	s.busy--
	if s.busy == 0 {
		s.work.Broadcast() // for pause
	}
	if err := s.queue.Push(c.Head, written); err != nil {
		s.irq.NeedsReset()
		return
	}
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
		s.work.Wait()
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
	if s.unhold != nil {
		s.unhold()
	}
	s.work.Broadcast()
	s.mu.Unlock()
	s.workers.Wait()
}
