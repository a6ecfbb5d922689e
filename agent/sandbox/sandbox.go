package sandbox

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"torpor/agent/store"
	"torpor/api/apierr"
)

// Sandbox is one sandbox. Its fields are owned by the goroutine that runs loop, unless said otherwise.
type Sandbox struct {
	m     *Manager
	id    string
	token string // never changes
	paths paths
	log   zerolog.Logger

	inbox chan func()
	gone  chan struct{}        // closed when loop has ended
	view  atomic.Pointer[View] // what everybody sees
	work  sync.WaitGroup       // every goroutine of this sandbox but loop

	rec           store.Sandbox
	envd          EnvdStatus
	resident      uint64
	snapshotBytes uint64

	op       *operation // the one under way, nil if none
	live     *live      // the VM that serves, nil if none
	frozen   *frozen    // the VM that is kept after a pause, nil if none
	vm       VM         // the process, also while it is being started; nil if there is none
	waiters  []*waiter  // want it ready
	pausers  []chan error
	point    *checkpoint // the one under way, nil if none
	rollback *rollback   // the one that is under way or waits for a pause, nil if none
	tidying  *task       // clears up old files, nil if it never ran
	tidies   bool        // tidying is under way
	untidy   bool        // it is to look once more
	deadline deadline
	ended    bool // loop is to return
}

// operation is work that takes time: one start or one pause.
type operation struct {
	cancel context.CancelCauseFunc
	done   chan struct{} // closed when its goroutine has ended
}

// The reasons an operation is cancelled for.
var (
	errKilled   = errors.New("the sandbox is being killed")
	errDraining = apierr.New(apierr.Draining, "the agent of this node is stopping; try again in a moment")
)

func newSandbox(m *Manager, rec store.Sandbox) *Sandbox {
	s := &Sandbox{
		m: m, id: rec.ID, token: rec.Token, rec: rec,
		paths: paths{m.dir(rec.ID)},
		log:   m.cfg.Log.With().Str("sandbox", rec.ID).Logger(),
		inbox: make(chan func()),
		gone:  make(chan struct{}),
		envd:  EnvdStatus{State: Absent, Since: rec.Since, Version: rec.EnvdVersion},
	}
	s.publish()
	return s
}

// loop runs what it is sent until the sandbox has ended. It is the owner.
func (s *Sandbox) loop() {
	defer close(s.gone)
	for !s.ended {
		(<-s.inbox)()
	}
}

// do has the owner run f and returns after it has. It must not be called by the owner. It is false, and f is not run, if the
// sandbox has ended.
func (s *Sandbox) do(f func()) (ran bool) {
	done := make(chan struct{})
	select {
	case s.inbox <- func() { defer close(done); f() }:
		<-done
		return true
	case <-s.gone:
		return false
	}
}

// step is do for an operation: f is run only while op is the one under way and the sandbox is not being killed.
func (s *Sandbox) step(op *operation, f func() error) error {
	err := errKilled
	s.do(func() {
		if s.op == op && s.state() != Stopping {
			err = f()
		}
	})
	return err
}

// begin starts an operation. Owner only; there must be none under way.
func (s *Sandbox) begin(run func(ctx context.Context, op *operation)) {
	ctx, cancel := context.WithCancelCause(s.m.ctx)
	op := &operation{cancel: cancel, done: make(chan struct{})}
	s.op = op
	s.work.Go(func() {
		defer cancel(nil)
		defer close(op.done)
		run(ctx, op)
	})
}

func (s *Sandbox) state() VMState { return VMState(s.rec.State) }

// transition is one change of the VM's state.
type transition struct {
	to     VMState
	reason string
	phases phases
	envd   *EnvdStatus // changes at the same instant; nil leaves it, but for states in which nothing runs
	change func(*store.Sandbox)
}

// move makes a transition: it is legal or a *TransitionError, it is in the store with its event, and then it is so. Owner only.
func (s *Sandbox) move(t transition) error {
	if err := checkMove(s.state(), t.to); err != nil {
		return err
	}
	rec, envd, events := s.after(t)
	if err := s.m.cfg.Store.Put(s.m.undying, rec, events...); err != nil {
		return fmt.Errorf("record %s: %w", t.to, err)
	}
	s.become(rec, envd, events)
	return nil
}

// settle is move for what has happened already: it is shown even if it cannot be recorded. A restart of the agent then finds
// the earlier state in the store and resolves it to the same end. Owner only.
func (s *Sandbox) settle(t transition) {
	err := s.move(t)
	if err == nil {
		return
	}
	s.log.Error().Err(err).Str("to", string(t.to)).Str("reason", t.reason).Msg("a transition is not recorded")
	if _, illegal := errors.AsType[*TransitionError](err); !illegal {
		s.become(s.after(t))
	}
}

// after works out what a transition leads to.
func (s *Sandbox) after(t transition) (store.Sandbox, EnvdStatus, []store.Event) {
	rec := s.rec.Clone()
	rec.State, rec.Reason, rec.Since = string(t.to), t.reason, now()
	if t.change != nil {
		t.change(&rec)
	}
	events := []store.Event{{
		At: rec.Since, Type: "vm", From: s.rec.State, To: rec.State, Reason: t.reason, Incarnation: rec.Incarnation, Phases: t.phases,
	}}
	envd := s.envd
	switch {
	case t.envd != nil:
		envd = *t.envd
	case t.to == Paused, t.to == Stopped, t.to == Failed:
		envd = s.envd.as(Absent)
	}
	if envd.State != s.envd.State {
		envd.Since = rec.Since
		events = append(events, s.envdEvent(envd, t.reason, t.phases, rec.Incarnation))
	}
	return rec, envd, events
}

func (s *Sandbox) become(rec store.Sandbox, envd EnvdStatus, events []store.Event) {
	s.rec, s.envd = rec, envd
	for _, e := range events {
		s.log.Info().Str("from", e.From).Str("to", e.To).Str("reason", e.Reason).Uint64("incarnation", e.Incarnation).Msg(e.Type)
	}
	s.publish()
}

// amend changes the record without a transition. Owner only.
func (s *Sandbox) amend(change func(*store.Sandbox)) error {
	rec := s.rec.Clone()
	change(&rec)
	if err := s.m.cfg.Store.Put(s.m.undying, rec); err != nil {
		return err
	}
	s.rec = rec
	s.publish()
	return nil
}

// setEnvd changes what is known of envd; a change of state is an event. Owner only.
func (s *Sandbox) setEnvd(st EnvdStatus, reason string, phases phases) {
	if st.State == s.envd.State {
		st.Since = s.envd.Since
		s.envd = st
		s.publish()
		return
	}
	st.Since = now()
	event := s.envdEvent(st, reason, phases, s.rec.Incarnation)
	if err := s.m.cfg.Store.Append(s.m.undying, s.id, event); err != nil {
		s.log.Error().Err(err).Msg("an event of envd is not recorded")
	}
	s.become(s.rec, st, []store.Event{event})
}

func (s *Sandbox) envdEvent(st EnvdStatus, reason string, phases phases, incarnation uint64) store.Event {
	return store.Event{
		At: st.Since, Type: "envd", From: string(s.envd.State), To: string(st.State), Reason: reason,
		Incarnation: incarnation, Phases: phases,
	}
}

// fail makes an error about this sandbox that carries both states. Owner only.
func (s *Sandbox) fail(code apierr.Code, format string, args ...any) *apierr.Error {
	return apierr.New(code, format, args...).For(s.id).With(s.rec.State, string(s.envd.State))
}

// phases are the durations of the parts of an operation, in milliseconds.
type phases map[string]float64

// add records the time since began and returns the present.
func (p phases) add(name string, began time.Time) time.Time {
	t := time.Now()
	p[name] = float64(t.Sub(began).Microseconds()) / 1000
	return t
}

// now is the present in the precision that is stored.
func now() time.Time { return time.UnixMilli(time.Now().UnixMilli()).UTC() }
