package sandbox

import (
	"context"
	"errors"
	"slices"
	"time"

	"torpor/api/apierr"
)

// waiter is one call that needs the sandbox ready.
type waiter struct {
	ctx     context.Context // of the call: one that has ended wakes nothing any more
	since   time.Time
	reason  string        // what a wake for it is recorded with
	timeout time.Duration // asked for by a connect; 0 means the sandbox's own
	cold    bool          // a wake for it boots anew and leaves the memory image alone
	result  chan error    // capacity 1, written once
}

func newWaiter(ctx context.Context, reason string, timeout time.Duration) *waiter {
	return &waiter{ctx: ctx, since: time.Now(), reason: reason, timeout: timeout, result: make(chan error, 1)}
}

// Resume makes the sandbox ready: it joins a wake under way, waits out a pause under way, and answers at once when the sandbox
// is ready. timeout extends the deadline to at least now + timeout, and is the whole of it after a wake; 0 means the
// sandbox's own. resumed says that it was not ready when the call came.
func (s *Sandbox) Resume(ctx context.Context, timeout time.Duration) (v View, resumed bool, err error) {
	return s.Wake(ctx, WakeRequest{Timeout: timeout})
}

// WakeRequest says how a sandbox is made ready.
type WakeRequest struct {
	Timeout time.Duration // see Resume
	Cold    bool          // if it does not run and nobody else has woken it: boot it anew on its disk and leave its memory image alone
}

// Wake is Resume with all its choices.
func (s *Sandbox) Wake(ctx context.Context, r WakeRequest) (v View, resumed bool, err error) {
	timeout := r.Timeout
	if timeout < 0 || timeout > maxTimeout {
		return View{}, false, apierr.New(apierr.BadRequest, "timeout_seconds must be between 0 and %d", int64(maxTimeout/time.Second)).For(s.id)
	}
	w := newWaiter(ctx, "resumed by request", timeout)
	w.cold = r.Cold
	var refused error
	ran := s.do(func() {
		if s.usable() {
			if refused = s.extend(timeout); refused == nil {
				w.result <- nil
			}
			return
		}
		resumed = true
		refused = s.enlist(w)
	})
	switch {
	case !ran:
		return View{}, false, notFound(s.id)
	case refused != nil:
		return View{}, false, refused
	}
	if err := s.await(ctx, w); err != nil {
		return View{}, resumed, err
	}
	return s.View(), resumed, nil
}

// usable reports whether requests can be served now. Owner only.
func (s *Sandbox) usable() bool {
	return s.state() == Running && s.live != nil && s.envd.State == Ready && s.envd.Incarnation == s.rec.Incarnation
}

// enlist puts w among those who wait, and wakes the sandbox if nobody has. Owner only.
func (s *Sandbox) enlist(w *waiter) error {
	switch s.state() {
	case Stopping:
		return s.fail(apierr.Deleting, "the sandbox is being killed")
	case Paused, Stopped, Failed:
		if s.op != nil {
			break // the last VM is being cleared away; opEnded wakes
		}
		if err := s.beginResume(w); err != nil {
			return err
		}
	default: // a start is under way, envd is being waited for, or a pause is under way after which opEnded wakes
	}
	s.waiters = append(s.waiters, w)
	return nil
}

// await returns what became of w, or not_ready with both states when ctx ends first.
func (s *Sandbox) await(ctx context.Context, w *waiter) error {
	select {
	case err := <-w.result:
		return err
	case <-ctx.Done():
	}
	err := error(notFound(s.id))
	s.do(func() {
		s.waiters = slices.DeleteFunc(s.waiters, func(o *waiter) bool { return o == w })
		err = s.fail(apierr.NotReady, "the sandbox is not ready yet: the VM is %s, envd is %s; try again", s.rec.State, s.envd.State)
	})
	select {
	case result := <-w.result: // it came at the last moment
		return result
	default:
		return err
	}
}

// settleWaiters answers everybody who waits. Owner only.
func (s *Sandbox) settleWaiters(failure *apierr.Error) {
	waiting := s.waiters
	s.waiters = nil
	for _, w := range waiting {
		if failure != nil {
			w.result <- failure
			continue
		}
		if err := s.extend(w.timeout); err != nil {
			w.result <- err
			continue
		}
		w.result <- nil
	}
}

// waitersLeft forgets the waiters whose calls have ended and reports whether any is left. Owner only.
func (s *Sandbox) waitersLeft() bool {
	s.waiters = slices.DeleteFunc(s.waiters, func(w *waiter) bool { return w.ctx.Err() != nil })
	return len(s.waiters) > 0
}

// wanted is how long the run that begins now shall last: the longest that a waiter asks for. Owner only.
func (s *Sandbox) wanted() time.Duration {
	longest := time.Duration(0)
	for _, w := range s.waiters {
		if w.timeout == 0 {
			longest = max(longest, s.rec.Timeout)
		}
		longest = max(longest, w.timeout)
	}
	if longest == 0 {
		return s.rec.Timeout
	}
	return longest
}

func notFound(id string) *apierr.Error {
	return apierr.New(apierr.NotFound, "there is no sandbox %q", id).For(id)
}

// isCode reports whether err is an *apierr.Error of the code.
func isCode(err error, code apierr.Code) bool { return errors.Is(err, &apierr.Error{Code: code}) }
