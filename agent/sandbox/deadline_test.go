package sandbox

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"torpor/api/apierr"
)

func short(d time.Duration, onTimeout string) func(*CreateRequest) {
	return func(q *CreateRequest) { q.Timeout, q.OnTimeout = d, onTimeout }
}

func TestDeadlinePausesOrKills(t *testing.T) {
	r := newRig(t)
	p := r.create("i1", short(50*time.Millisecond, "pause"))
	k := r.create("i2", short(50*time.Millisecond, "kill"))
	v := r.until(p, "paused", func(v View) bool { return v.VM() == Paused })
	if v.Reason != "its deadline passed" || v.Generation != 1 {
		t.Errorf("paused as %+v", v)
	}
	<-k.gone
	r.gone("i2")
	if !r.hasEvent("i2", Stopping, "its deadline passed") {
		t.Error("no event says why it is gone")
	}
}

func TestPauseTakesTheDeadlineAwayWhateverItWouldHaveDone(t *testing.T) {
	r := newRig(t)
	s := r.create("i1", short(100*time.Millisecond, "kill"))
	r.pause(s)
	other := r.create("i2", short(150*time.Millisecond, "kill")) // its end comes after that of i1 would have
	<-other.gone
	if v := s.View(); v.VM() != Paused {
		t.Errorf("the old deadline fired: %s", v.State)
	}
}

func TestConnectOnlyExtendsAndSetDeadlineMayShorten(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	end := s.View().EndAt
	v, resumed, err := s.Resume(r.ctx(), time.Second)
	if err != nil || resumed || !v.EndAt.Equal(end) {
		t.Errorf("connect with a small timeout: %v %v, end %v", resumed, err, v.EndAt)
	}
	v, _, err = s.Resume(r.ctx(), 2*time.Hour)
	if err != nil || !v.EndAt.After(end) {
		t.Errorf("connect with a large timeout: %v, end %v", err, v.EndAt)
	}
	nearer := now().Add(time.Minute)
	if v, err = s.SetDeadline(nearer, true); err != nil || v.EndAt.Equal(nearer) {
		t.Errorf("extend only has shortened: %v", err)
	}
	if v, err = s.SetDeadline(nearer, false); err != nil || !v.EndAt.Equal(nearer) {
		t.Errorf("set deadline: %v, end %v", err, v.EndAt)
	}
}

func TestTimeoutAfterAWake(t *testing.T) {
	r := newRig(t)
	s := r.create("i1") // an hour
	r.pause(s)
	l, err := r.m.Acquire(r.ctx(), "i1", allow)
	if err != nil {
		t.Fatal(err)
	}
	l.Release()
	if left := time.Until(s.View().EndAt); left < 50*time.Minute {
		t.Errorf("an automatic wake has the sandbox's own timeout, got %v", left)
	}
	r.pause(s)
	v, _, err := s.Resume(r.ctx(), 10*time.Minute)
	if left := time.Until(v.EndAt); err != nil || left > 10*time.Minute || left < 9*time.Minute {
		t.Errorf("a connect brings its own timeout, got %v, %v", left, err)
	}
}

func TestPastDeadlineEndsTheRunAtOnce(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	if _, err := s.SetDeadline(now().Add(-time.Second), false); err != nil {
		t.Fatal(err)
	}
	r.until(s, "paused", func(v View) bool { return v.VM() == Paused })
	_, err := s.SetDeadline(now().Add(time.Hour), false)
	wantCode(t, err, apierr.NotFound) // no running clock
}

func TestFailedPauseOnDeadlineIsTriedAgain(t *testing.T) {
	r := newRig(t)
	s := r.create("i1", short(20*time.Millisecond, "pause"))
	var mu sync.Mutex
	failures := 0
	r.w.setHook(func(_ context.Context, op, _ string) error {
		mu.Lock()
		defer mu.Unlock()
		if op == "save" && failures < 3 {
			failures++
			return errors.New("boom")
		}
		return nil
	})
	v := r.until(s, "paused", func(v View) bool { return v.VM() == Paused })
	if v.Generation != 4 || r.w.count("save") != 4 {
		t.Errorf("generation %d after %d saves", v.Generation, r.w.count("save"))
	}
}

// A connect that was answered must not be followed by the pause of the deadline it has moved.
func TestConnectAndDeadlineRace(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	for range 60 {
		if _, err := s.SetDeadline(now().Add(3*time.Millisecond), false); err != nil {
			t.Fatal(err)
		}
		timer := time.NewTimer(3 * time.Millisecond)
		<-timer.C
		v, _, err := s.Resume(r.ctx(), time.Hour)
		if err != nil || !v.Usable() {
			t.Fatalf("connect at the deadline: %v, %+v", err, v)
		}
		if left := time.Until(v.EndAt); left < 59*time.Minute {
			t.Fatalf("the answer promises %v", left)
		}
		s.do(func() {}) // whatever the timer sent has been decided
		if got := s.View(); got.VM() != Running || got.Incarnation != v.Incarnation {
			t.Fatalf("after the answer it is %s", got.State)
		}
	}
}
