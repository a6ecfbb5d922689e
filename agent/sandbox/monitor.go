package sandbox

import (
	"context"
	"errors"
	"time"

	"torpor/api/guestpb"
	"torpor/api/vmmpb"
)

// watchEnvd begins to watch envd. Without an open contact it first gets one. Owner only.
func (s *Sandbox) watchEnvd(l *live) {
	contact := l.contact
	l.monitor = s.goTask(func(ctx context.Context) {
		for ctx.Err() == nil {
			if contact == nil {
				contact = s.recoverEnvd(ctx, l)
				continue
			}
			if cause := s.probeUntilLost(ctx, l, contact); ctx.Err() == nil {
				s.report(ctx, l, func() { s.unresponsive(cause) })
				contact.Close()
				contact = nil
			}
		}
	})
}

// probeUntilLost probes envd from time to time, and at once when the contact breaks. It returns why envd cannot be relied on,
// or when ctx ends. One probe may fail: a guest may be busy. The second in a row says that it does not answer.
func (s *Sandbox) probeUntilLost(ctx context.Context, l *live, contact Contact) error {
	every := time.NewTicker(s.m.cfg.Budgets.ProbeEvery)
	defer every.Stop()
	for {
		if resident := s.residentBytes(ctx, l); resident > 0 {
			s.report(ctx, l, func() { s.resident = resident; s.publish() })
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-contact.Lost():
			return errors.New("envd closed its control connection")
		case <-every.C:
		}
		latency, err := s.probe(ctx, l)
		if err != nil {
			if latency, err = s.probe(ctx, l); err != nil {
				return err
			}
		}
		s.report(ctx, l, func() {
			st := s.envd
			st.LastOK, st.Latency, st.Error = now(), latency, ""
			s.setEnvd(st, "", nil)
		})
	}
}

func (s *Sandbox) probe(ctx context.Context, l *live) (time.Duration, error) {
	budget, cancel := context.WithTimeout(ctx, s.m.cfg.Budgets.ProbeTimeout)
	defer cancel()
	return l.guest.Probe(budget, l.incarnation)
}

func (s *Sandbox) residentBytes(ctx context.Context, l *live) uint64 {
	budget, cancel := context.WithTimeout(ctx, s.m.cfg.Budgets.ProbeTimeout)
	defer cancel()
	status, err := l.vm.Status(budget, &vmmpb.StatusRequest{})
	if err != nil {
		return 0
	}
	return status.ResidentBytes
}

// recoverEnvd tries until envd completes a handshake and a probe in this incarnation, or ctx ends.
func (s *Sandbox) recoverEnvd(ctx context.Context, l *live) Contact {
	for pause := s.m.cfg.Budgets.RetryMin; ; pause = min(2*pause, s.m.cfg.Budgets.RetryMax) {
		contact, latency, times, err := s.greetAgain(ctx, l)
		if err == nil {
			ready := false
			s.report(ctx, l, func() {
				l.contact, l.latency, ready = contact, latency, true
				s.setEnvd(l.ready(), "envd answered a new handshake of this incarnation", times)
				s.settleWaiters(nil)
			})
			if ready {
				return contact
			}
			contact.Close() // a pause or the end came between
			return nil
		}
		s.report(ctx, l, func() { s.unresponsive(err) })
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
	}
}

func (s *Sandbox) greetAgain(ctx context.Context, l *live) (Contact, time.Duration, phases, error) {
	var greeting *guestpb.HandshakeRequest
	if !s.do(func() { greeting = s.greeting() }) {
		return nil, 0, nil, errKilled
	}
	budget, cancel := context.WithTimeoutCause(ctx, s.m.cfg.Budgets.Handshake, errors.New("envd did not answer in time"))
	defer cancel()
	times := phases{}
	at := time.Now()
	contact, err := l.guest.Handshake(budget, greeting)
	if err != nil {
		return nil, 0, nil, err
	}
	at = times.add("handshake", at)
	latency, err := l.guest.Probe(budget, l.incarnation)
	if err != nil {
		contact.Close()
		return nil, 0, nil, err
	}
	times.add("probe", at)
	return contact, latency, times, nil
}

// report has the owner run f if l still serves and its monitor was not stopped: what a monitor saw of a VM that is being
// paused proves nothing.
func (s *Sandbox) report(ctx context.Context, l *live, f func()) {
	s.do(func() {
		if ctx.Err() == nil && s.live == l && s.state() == Running {
			f()
		}
	})
}

// unresponsive says that envd does not answer. Owner only.
func (s *Sandbox) unresponsive(cause error) {
	st := s.envd
	if st.State == Ready {
		st.State = Unresponsive // starting stays starting: it has not been ready in this incarnation
	}
	st.Error = cause.Error()
	s.setEnvd(st, cause.Error(), nil)
}

// ready is the status of an envd that has just completed a handshake and a probe.
func (l *live) ready() EnvdStatus {
	return EnvdStatus{State: Ready, Version: l.contact.EnvdVersion(), Incarnation: l.incarnation, LastOK: now(), Latency: l.latency}
}
