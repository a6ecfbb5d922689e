package sandbox

import (
	"context"
	"errors"
	"fmt"
	"net"

	"torpor/agent/gateway"
	"torpor/agent/guest"
	"torpor/api/apierr"
)

// lease is one data-plane request in flight.
type lease struct {
	s *Sandbox
	l *live
}

// Acquire implements gateway.Sandboxes.
func (m *Manager) Acquire(ctx context.Context, sandboxID string, wake func(token string) bool) (gateway.Lease, error) {
	s := m.find(sandboxID)
	if s == nil {
		return nil, notFound(sandboxID)
	}
	held, cancel := context.WithTimeout(ctx, m.cfg.Budgets.Hold)
	defer cancel()
	got, err := s.acquire(held, wake)
	if err != nil {
		return nil, err
	}
	return got, nil
}

func (s *Sandbox) acquire(ctx context.Context, wake func(token string) bool) (*lease, error) {
	authorised := false
	for asked := false; ; {
		w := newWaiter(ctx, "woken by a request", 0)
		got, err := s.admit(w, asked, authorised)
		switch {
		case errors.Is(err, errAsk):
			asked, authorised = true, wake(s.token)
			continue
		case err != nil || got != nil:
			return got, err
		}
		switch err := s.await(ctx, w); {
		case isCode(err, apierr.Deleting):
			return nil, notFound(s.id)
		case err != nil:
			return nil, err
		}
		// It was ready a moment ago. Take the lease, or wait again if it was paused between.
	}
}

// errAsk says that the request's right to wake must be known first.
var errAsk = errors.New("ask whether the request may wake the sandbox")

// admit gives a lease, or enlists w, or refuses.
func (s *Sandbox) admit(w *waiter, asked, authorised bool) (got *lease, err error) {
	ran := s.do(func() {
		if s.usable() {
			s.live.inflight++
			got = &lease{s, s.live}
			return
		}
		if !asked {
			err = errAsk
			return
		}
		if !s.admissible(authorised) {
			err = notFound(s.id)
			return
		}
		err = s.enlist(w)
	})
	if !ran {
		return nil, notFound(s.id)
	}
	return got, err
}

// admissible reports whether a request may be held for a sandbox that is not ready. Owner only.
func (s *Sandbox) admissible(authorised bool) bool {
	switch s.state() {
	case Running:
		return true // envd itself refuses what is not authorised, when it answers again
	case Creating, Resuming:
		return authorised
	case Pausing, Paused:
		return authorised && s.rec.AutoResume
	default:
		// A stopped sandbox would come back older than it was: that is for an explicit resume to ask.
		return false
	}
}

// Dial implements gateway.Lease.
func (l *lease) Dial(ctx context.Context, port uint16) (net.Conn, error) {
	select {
	case <-l.l.done:
		return nil, errors.New("the sandbox does not run any more")
	default:
	}
	budget, cancel := context.WithTimeout(ctx, l.s.m.cfg.Budgets.Dial)
	defer cancel()
	conn, err := l.l.guest.Dial(budget, port)
	if errors.Is(err, guest.ErrClosed) {
		return nil, fmt.Errorf("guest port %d: %w", port, gateway.ErrPortClosed)
	}
	return conn, err
}

// Done implements gateway.Lease.
func (l *lease) Done() <-chan struct{} { return l.l.done }

// Release implements gateway.Lease.
func (l *lease) Release() {
	l.s.do(func() {
		l.l.inflight--
		if l.l.inflight == 0 && l.l.drained != nil {
			close(l.l.drained)
			l.l.drained = nil
		}
	})
}
