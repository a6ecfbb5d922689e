package process

import (
	"sync"
	"time"

	"torpor/api/envd"
)

const (
	// queueLen bounds what one subscriber may lag behind, in events of at most 32 KiB.
	queueLen = 32
	// stallLimit is how long one subscriber that takes nothing may hold up the others before it is cut off.
	stallLimit = 15 * time.Second
)

// hub hands the events of one process to its subscribers. Publishing waits for a subscriber whose queue is full, so an
// attached reader loses nothing and the process feels its slowness as a full pipe. It never waits for one that left, and
// without subscribers events are dropped.
type hub struct {
	stall time.Duration

	mu   sync.Mutex
	subs []*subscriber
	end  *envd.ProcessEvent // set once all output was published
}

// subscriber is one reader of a hub.
type subscriber struct {
	events chan *envd.ProcessEvent
	left   chan struct{} // closed when the reader has gone
	cut    chan struct{} // closed when the hub gave the reader up
	leave  func()        // idempotent
}

// subscribe adds a reader of all that is published from now on. If the process has ended, its queue holds just the end.
func (h *hub) subscribe() *subscriber {
	s := &subscriber{
		events: make(chan *envd.ProcessEvent, queueLen),
		left:   make(chan struct{}),
		cut:    make(chan struct{}),
	}
	s.leave = sync.OnceFunc(func() {
		close(s.left)
		h.remove(s)
	})
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.end != nil {
		s.events <- h.end
		return s
	}
	h.subs = append(h.subs, s)
	return s
}

func (h *hub) remove(s *subscriber) {
	h.mu.Lock()
	defer h.mu.Unlock()
	// A new slice: publish walks the old one without the lock.
	kept := make([]*subscriber, 0, len(h.subs))
	for _, other := range h.subs {
		if other != s {
			kept = append(kept, other)
		}
	}
	h.subs = kept
}

// publish hands ev to every subscriber. Events of one caller arrive in the order of its calls.
func (h *hub) publish(ev *envd.ProcessEvent) {
	h.mu.Lock()
	subs := h.subs
	h.mu.Unlock()
	h.deliver(subs, ev)
}

// finish publishes the last event and answers later subscribers with it. All other publishing must be over.
func (h *hub) finish(ev *envd.ProcessEvent) {
	h.mu.Lock()
	h.end = ev
	subs := h.subs
	h.subs = nil
	h.mu.Unlock()
	h.deliver(subs, ev)
}

func (h *hub) deliver(subs []*subscriber, ev *envd.ProcessEvent) {
	for _, s := range subs {
		select {
		case s.events <- ev:
		default:
			h.wait(s, ev, len(subs) > 1)
		}
	}
}

func (h *hub) wait(s *subscriber, ev *envd.ProcessEvent, crowded bool) {
	var patience <-chan time.Time
	if crowded {
		t := time.NewTimer(h.stall)
		defer t.Stop()
		patience = t.C
	}
	select {
	case s.events <- ev:
	case <-s.left:
	case <-s.cut:
	case <-patience:
		h.give(s)
	}
}

// give cuts off a reader that held up the others. Two publishers may get here at once.
func (h *hub) give(s *subscriber) {
	h.remove(s)
	h.mu.Lock()
	defer h.mu.Unlock()
	select {
	case <-s.cut:
	default:
		close(s.cut)
	}
}
