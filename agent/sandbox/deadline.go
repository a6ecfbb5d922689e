package sandbox

import (
	"time"

	"torpor/agent/store"
	"torpor/api/apierr"
)

// deadline is the clock of a running sandbox. The number makes a timer that was overtaken by a change harmless: the owner
// compares it when the timer's message comes.
type deadline struct {
	timer  *time.Timer
	number uint64
	retry  time.Duration // back-off after what the deadline asked for failed
}

func (d *deadline) stop() {
	d.number++
	if d.timer != nil {
		d.timer.Stop()
	}
}

// armDeadline sets the timer to the record's EndAt. Owner only.
func (s *Sandbox) armDeadline() {
	s.deadline.retry = 0
	s.armAt(s.rec.EndAt)
}

func (s *Sandbox) armAt(at time.Time) {
	s.deadline.stop()
	number := s.deadline.number
	s.deadline.timer = time.AfterFunc(max(0, time.Until(at)), func() {
		s.do(func() {
			if s.deadline.number == number {
				s.expired()
			}
		})
	})
}

// expired ends the run as the sandbox's life cycle says. Owner only.
func (s *Sandbox) expired() {
	if s.state() != Running || s.op != nil {
		return
	}
	if now().Before(s.rec.EndAt) {
		s.armAt(s.rec.EndAt) // the wall clock was set back
		return
	}
	if s.rec.OnTimeout != onTimeoutPause {
		if err := s.beginKill("its deadline passed"); err != nil {
			s.log.Warn().Err(err).Msg("kill on deadline")
			s.retryExpiry()
		}
		return
	}
	if err := s.beginPause("its deadline passed"); err != nil {
		s.log.Warn().Err(err).Msg("pause on deadline")
		s.retryExpiry()
	}
}

// retryExpiry tries what the deadline asked for again, later each time. Owner only.
func (s *Sandbox) retryExpiry() {
	b := s.m.cfg.Budgets
	s.deadline.retry = min(max(2*s.deadline.retry, b.RetryMin), b.RetryMax)
	s.armAt(time.Now().Add(s.deadline.retry))
}

// extend moves the deadline to at least now + d; it never shortens. Owner only.
func (s *Sandbox) extend(d time.Duration) error {
	at := now().Add(d)
	if d <= 0 || !at.After(s.rec.EndAt) {
		return nil
	}
	if err := s.amend(func(r *store.Sandbox) { r.EndAt = at }); err != nil {
		return err
	}
	s.armDeadline()
	return nil
}

// SetDeadline sets the deadline of a running sandbox, or only extends it. A time that has passed ends the run at once.
// not_found if it is paused, in_transition while it changes.
func (s *Sandbox) SetDeadline(at time.Time, extendOnly bool) (View, error) {
	var err error
	if !s.do(func() { err = s.setDeadline(at, extendOnly) }) {
		return View{}, notFound(s.id)
	}
	if err != nil {
		return View{}, err
	}
	return s.View(), nil
}

func (s *Sandbox) setDeadline(at time.Time, extendOnly bool) error {
	switch s.state() {
	case Running:
	case Creating, Resuming, Pausing:
		return s.fail(apierr.InTransition, "the sandbox is %s; set the timeout when that is done", s.rec.State)
	case Stopping:
		return s.fail(apierr.Deleting, "the sandbox is being killed")
	default:
		return s.fail(apierr.NotFound, "the sandbox is %s and has no running clock; connect resumes it with a new timeout", s.rec.State)
	}
	if extendOnly && !at.After(s.rec.EndAt) {
		return nil
	}
	if err := s.amend(func(r *store.Sandbox) { r.EndAt = at }); err != nil {
		return err
	}
	s.armDeadline()
	if !now().Before(at) {
		s.expired()
	}
	return nil
}
