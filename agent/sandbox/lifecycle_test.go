package sandbox

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"torpor/agent/gateway"
	"torpor/api/apierr"
)

func TestCreateAnswersReadyAndRecordsWhatHappened(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	v := s.View()
	if v.Incarnation != 1 || v.Envd.Incarnation != 1 || v.Generation != 0 || v.StartedAt.IsZero() || v.VCPUs != 2 {
		t.Errorf("view %+v", v)
	}
	if left := time.Until(v.EndAt); left < 50*time.Minute || left > time.Hour {
		t.Errorf("ends in %v", left)
	}
	if v.Token != "" || v.Env != nil {
		t.Error("the view carries secrets")
	}
	events, err := r.m.Events(r.ctx(), "i1", 0, 100)
	if err != nil {
		t.Fatal(err)
	}
	var path []string
	for _, e := range events {
		path = append(path, e.Type+" "+e.From+">"+e.To)
		if e.Incarnation != 1 || e.Reason == "" || e.At.IsZero() {
			t.Errorf("event %+v", e)
		}
	}
	want := []string{"vm >creating", "envd absent>starting", "vm creating>running", "envd starting>ready"}
	if !slices.Equal(path, want) {
		t.Errorf("events %v, want %v", path, want)
	}
	for _, phase := range []string{"queue", "vmmStart", "restore", "handshake", "probe", "total"} {
		if _, ok := events[2].Phases[phase]; !ok {
			t.Errorf("phase %s is missing in %v", phase, events[2].Phases)
		}
	}
}

func TestCreateOfAnUnknownTemplateLeavesNothing(t *testing.T) {
	r := newRig(t)
	req := request("i1")
	req.TemplateID = "other"
	_, err := r.m.Create(r.ctx(), req)
	wantCode(t, err, apierr.NotFound)
	if _, err := r.m.Events(r.ctx(), "i1", 0, 1); !isCode(err, apierr.NotFound) {
		t.Errorf("something is known of it: %v", err)
	}
}

func TestBadCreateRequestsAreRefused(t *testing.T) {
	r := newRig(t)
	for name, spoil := range map[string]func(*CreateRequest){
		"id with a dash": func(q *CreateRequest) { q.ID = "a-b" },
		"path as id":     func(q *CreateRequest) { q.ID = "../x" },
		"no template":    func(q *CreateRequest) { q.TemplateID = "" },
		"no timeout":     func(q *CreateRequest) { q.Timeout = 0 },
		"huge timeout":   func(q *CreateRequest) { q.Timeout = 1<<63 - 1 },
		"on timeout":     func(q *CreateRequest) { q.OnTimeout = "explode" },
	} {
		req := request("i1")
		spoil(&req)
		if _, err := r.m.Create(r.ctx(), req); !isCode(err, apierr.BadRequest) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestConcurrentCreatesOfOneIDMakeOneVM(t *testing.T) {
	r := newRig(t)
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if v, err := r.m.Create(r.ctx(), request("i1")); err != nil || !v.Usable() {
				t.Errorf("got %v, %+v", err, v)
			}
		})
	}
	wg.Wait()
	if n := r.w.count("restore"); n != 1 {
		t.Errorf("%d restores", n)
	}
}

func TestFailedCreateLeavesNothingAtEveryStep(t *testing.T) {
	for _, step := range []string{"start", "restore", "handshake", "probe"} {
		t.Run(step, func(t *testing.T) {
			r := newRig(t)
			r.w.setHook(failing(step, errors.New("boom")))
			_, err := r.m.Create(r.ctx(), request("i1"))
			wantCode(t, err, apierr.NotReady)
			if !strings.Contains(err.Error(), "boom") {
				t.Errorf("the cause is lost: %v", err)
			}
			r.w.setHook(nil)
			if err := r.m.Kill(r.ctx(), "i1"); err != nil {
				t.Error(err)
			}
			r.gone("i1")
			if !r.hasEvent("i1", Stopping, "create failed") {
				t.Error("no event says why")
			}
		})
	}
}

// The cause reaches the caller however soon the failure comes: here before the caller had a chance to wait for it.
func TestAFailureAtOnceHasACause(t *testing.T) {
	r := newRig(t)
	r.w.setHook(failing("start", errors.New("boom")))
	base, err := r.m.origin(r.ctx(), request("i1"))
	if err != nil {
		t.Fatal(err)
	}
	w := newWaiter(r.ctx(), "created by request", 0)
	s, first, err := r.m.add(r.ctx(), request("i1"), base, time.Now(), w)
	if err != nil || !first {
		t.Fatal(first, err)
	}
	<-s.gone
	if err := s.await(r.ctx(), w); !isCode(err, apierr.NotReady) || !strings.Contains(err.Error(), "boom") {
		t.Errorf("the cause is lost: %v", err)
	}
}

// failing is a hook that fails one operation.
func failing(step string, err error) func(context.Context, string, string) error {
	return func(_ context.Context, op, _ string) error {
		if op == step {
			return err
		}
		return nil
	}
}

// holding is a hook that holds one operation until released, or until its ctx ends.
func holding(step string) (hook func(context.Context, string, string) error, reached chan struct{}, release func()) {
	reached, free := make(chan struct{}), make(chan struct{})
	var once, freeOnce sync.Once
	return func(ctx context.Context, op, _ string) error {
		if op != step {
			return nil
		}
		once.Do(func() { close(reached) })
		select {
		case <-free:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}, reached, func() { freeOnce.Do(func() { close(free) }) }
}

func TestMemorySurvivesManyPauses(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	r.w.setMemory("i1", "nonce")
	for cycle := uint64(1); cycle <= 12; cycle++ {
		v := r.pause(s)
		if v.VM() != Paused || v.Generation < cycle || // merges have numbers too
			v.Envd.State != Absent {
			t.Fatalf("cycle %d: paused as %+v", cycle, v)
		}
		if time.Since(v.EndAt) > time.Minute || v.EndAt.After(time.Now()) {
			t.Errorf("endAt of a paused one is %v", v.EndAt)
		}
		v = r.resume(s)
		if v.Incarnation != cycle+1 || r.w.memory("i1") != "nonce" {
			t.Fatalf("cycle %d: resumed as incarnation %d with %q", cycle, v.Incarnation, r.w.memory("i1"))
		}
		var tidying *task
		s.do(func() { tidying = s.tidying })
		<-tidying.done
	}
	if n := len(s.View().Layers); n > maxChain+2 {
		t.Errorf("the layer chain has grown to %d", n)
	}
	if g := s.generations(); len(g) > 1 {
		t.Errorf("generations left: %v", g)
	}
	files, err := os.ReadDir(s.paths.layers())
	if err != nil || len(files) > 2*(maxChain+2) {
		t.Errorf("%d layer files, %v", len(files), err)
	}
}

func TestFiftyConcurrentWakesRestoreOnce(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	r.pause(s)
	before := r.w.count("restore")
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			if i%2 == 0 {
				if v, resumed, err := s.Resume(r.ctx(), time.Minute); err != nil || !v.Usable() {
					t.Errorf("resume: %v %v", resumed, err)
				}
				return
			}
			l, err := r.m.Acquire(r.ctx(), "i1", allow)
			if err != nil {
				t.Error(err)
				return
			}
			defer l.Release()
			conn, err := l.Dial(r.ctx(), 49983)
			if err != nil {
				t.Error(err)
				return
			}
			conn.Close()
		})
	}
	wg.Wait()
	if n := r.w.count("restore") - before; n != 1 {
		t.Errorf("%d restores", n)
	}
}

func TestPauseThatFailsAtAnyStepLeavesTheSandboxRunning(t *testing.T) {
	for step, err := range map[string]error{"pause": errors.New("boom"), "save": errors.New("boom"), "save disk full": syscall.ENOSPC} {
		t.Run(step, func(t *testing.T) {
			r := newRig(t)
			s := r.create("i1")
			r.w.setMemory("i1", "nonce")
			l, acquireErr := r.m.Acquire(r.ctx(), "i1", deny)
			if acquireErr != nil {
				t.Fatal(acquireErr)
			}
			defer l.Release()
			op, _, _ := strings.Cut(step, " ")
			r.w.setHook(failing(op, err))
			_, got := s.Pause(r.ctx())
			want := apierr.NotReady
			if errors.Is(err, syscall.ENOSPC) {
				want = apierr.DiskFull
			}
			wantCode(t, got, want)
			r.w.setHook(nil)
			v := s.View()
			if !v.Usable() || v.Incarnation != 1 || v.Generation != 0 || r.w.memory("i1") != "nonce" {
				t.Errorf("after the failure: %+v", v)
			}
			if p := r.w.proc("i1"); p == nil || p.state != "running" {
				t.Errorf("the VM does not run on")
			}
			select {
			case <-l.Done():
				t.Error("the request in flight was cut")
			default:
			}
			if left, _ := filepath.Glob(filepath.Join(s.paths.dir, "gen-*")); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
			if v := r.pause(s); v.Generation != 2 { // numbers are never used again
				t.Errorf("the next pause made generation %d", v.Generation)
			}
		})
	}
}

func TestPauseWhoseVMCannotRunOnEndsTyped(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	r.w.setHook(func(_ context.Context, op, _ string) error {
		if op == "save" || op == "resume" {
			return errors.New("boom")
		}
		return nil
	})
	_, err := s.Pause(r.ctx())
	wantCode(t, err, apierr.NotReady)
	r.w.setHook(nil)
	if v := s.View(); v.VM() != Stopped || !strings.Contains(v.Reason, "boom") {
		t.Errorf("state %s, %s", v.State, v.Reason)
	}
	_, _, err = s.Resume(r.ctx(), 0)
	wantCode(t, err, apierr.SandboxBroken)
}

func TestResumeThatFailsAtAnyStepKeepsTheSnapshot(t *testing.T) {
	for _, step := range []string{"start", "restore", "handshake", "probe"} {
		t.Run(step, func(t *testing.T) {
			r := newRig(t)
			s := r.create("i1")
			r.w.setMemory("i1", "nonce")
			r.pause(s)
			r.w.setHook(failing(step, errors.New("boom")))
			_, _, err := s.Resume(r.ctx(), 0)
			wantCode(t, err, apierr.NotReady)
			if e := apierr.As(err); e.VM == "" || e.Envd == "" {
				t.Errorf("the error does not carry both states: %+v", e)
			}
			v := s.View()
			if v.VM() != Paused || v.Generation != 1 || r.w.proc("i1") != nil || len(v.Layers) != 1 {
				t.Errorf("after the failure: %+v", v)
			}
			r.w.setHook(nil)
			v = r.resume(s)
			if v.Incarnation != 3 || r.w.memory("i1") != "nonce" {
				t.Errorf("incarnation %d, memory %q", v.Incarnation, r.w.memory("i1"))
			}
		})
	}
}

func TestDamagedSnapshotIsNamedAndNothingIsStarted(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	r.pause(s)
	if err := os.WriteFile(filepath.Join(s.paths.generation(1), stateFile), []byte("statf"), 0o600); err != nil {
		t.Fatal(err)
	}
	starts := r.w.count("start")
	_, _, err := s.Resume(r.ctx(), 0)
	wantCode(t, err, apierr.SandboxBroken)
	if !strings.Contains(err.Error(), stateFile) {
		t.Errorf("the part is not named: %v", err)
	}
	if v := s.View(); v.VM() != Failed || r.w.count("start") != starts {
		t.Errorf("state %s", v.State)
	}
	if err := s.Kill(r.ctx(), "k"); err != nil {
		t.Error(err)
	}
	r.gone("i1")
}

func TestKillInEveryStateIsFinal(t *testing.T) {
	during := func(step string, begin func(r *rig, s *Sandbox)) func(t *testing.T, r *rig) {
		return func(t *testing.T, r *rig) {
			s := r.create("i1")
			if step == "start" || step == "restore" || step == "handshake" || step == "probe" {
				r.pause(s)
			}
			hook, reached, _ := holding(step)
			r.w.setHook(hook)
			begin(r, s)
			<-reached
		}
	}
	pausing := func(r *rig, s *Sandbox) { go s.Pause(r.ctx()) }
	resuming := func(r *rig, s *Sandbox) { go s.Resume(r.ctx(), 0) }
	for name, prepare := range map[string]func(t *testing.T, r *rig){
		"running":             func(_ *testing.T, r *rig) { r.create("i1") },
		"paused":              func(_ *testing.T, r *rig) { r.pause(r.create("i1")) },
		"pausing, VM":         during("pause", pausing),
		"pausing, save":       during("save", pausing),
		"resuming, start":     during("start", resuming),
		"resuming, restore":   during("restore", resuming),
		"resuming, handshake": during("handshake", resuming),
		"resuming, probe":     during("probe", resuming),
		"creating": func(_ *testing.T, r *rig) {
			hook, reached, _ := holding("restore")
			r.w.setHook(hook)
			go r.m.Create(r.ctx(), request("i1"))
			<-reached
		},
		"stopped": func(_ *testing.T, r *rig) {
			s := r.create("i1")
			r.w.die("i1")
			r.until(s, "stopped", func(v View) bool { return v.VM() == Stopped })
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			prepare(t, r)
			s := r.get("i1")
			var wg sync.WaitGroup
			for range 3 {
				wg.Go(func() {
					if err := r.m.Kill(r.ctx(), "i1"); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			r.w.setHook(nil)
			r.gone("i1")
			_, _, err := s.Resume(r.ctx(), 0)
			wantCode(t, err, apierr.NotFound)
			_, err = s.Pause(r.ctx())
			wantCode(t, err, apierr.NotFound)
			if _, err := r.m.Acquire(r.ctx(), "i1", allow); !isCode(err, apierr.NotFound) {
				t.Errorf("acquire: %v", err)
			}
			if _, err := r.m.Create(r.ctx(), request("i1")); !isCode(err, apierr.Gone) {
				t.Errorf("the id was used again: %v", err)
			}
			if !r.hasEvent("i1", Stopping, "killed by request") {
				t.Error("the events are not kept")
			}
			rec, err := r.cfg.Store.Sandbox(r.ctx(), "i1")
			if err != nil || rec.Token != "" || len(rec.Env) > 0 {
				t.Errorf("secrets outlive the sandbox: %+v, %v", rec, err)
			}
		})
	}
}

func TestKillOfAnUnknownIDIsNotFound(t *testing.T) {
	r := newRig(t)
	wantCode(t, r.m.Kill(r.ctx(), "never"), apierr.NotFound)
}

func TestRequestDuringPausingIsServedRightAfter(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	r.w.setMemory("i1", "nonce")
	hook, reached, release := holding("save")
	r.w.setHook(hook)
	paused := make(chan error, 1)
	go func() { _, err := s.Pause(r.ctx()); paused <- err }()
	<-reached
	got := make(chan error, 1)
	go func() {
		l, err := r.m.Acquire(r.ctx(), "i1", allow)
		if err == nil {
			l.Release()
		}
		got <- err
	}()
	for waiting := 0; waiting == 0; {
		s.do(func() { waiting = len(s.waiters) })
	}
	release()
	if err := errors.Join(<-paused, <-got); err != nil {
		t.Fatal(err)
	}
	if v := s.View(); !v.Usable() || v.Incarnation != 2 || r.w.memory("i1") != "nonce" {
		t.Errorf("served by %+v", v)
	}
}

func TestUnauthorisedAndUnwantedRequestsNeverWake(t *testing.T) {
	r := newRig(t)
	auto := r.create("i1")
	manual := r.create("i2", func(q *CreateRequest) { q.AutoResume = false })
	r.pause(auto)
	r.pause(manual)
	ends := auto.View().EndAt
	_, unknown := r.m.Acquire(r.ctx(), "nope", deny)
	_, unauthorised := r.m.Acquire(r.ctx(), "i1", deny)
	_, noAuto := r.m.Acquire(r.ctx(), "i2", allow)
	for _, err := range []error{unknown, unauthorised, noAuto} {
		wantCode(t, err, apierr.NotFound)
	}
	strip := func(err error) apierr.Body { e := *apierr.As(err); e.SandboxID = ""; e.Message = ""; return e.Body() }
	if strip(unknown) != strip(unauthorised) {
		t.Errorf("they can be told apart: %+v %+v", strip(unknown), strip(unauthorised))
	}
	if auto.View().VM() != Paused || manual.View().VM() != Paused || !auto.View().EndAt.Equal(ends) {
		t.Error("something woke or moved")
	}
	if l, err := r.m.Acquire(r.ctx(), "i1", func(token string) bool { return token == "secret" }); err != nil {
		t.Errorf("the right token does not wake: %v", err)
	} else {
		l.Release()
	}
}

func TestPauseWaitsForRequestsInFlightWithinTheGraceAndEndsThemAfterwards(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	l, err := r.m.Acquire(r.ctx(), "i1", deny)
	if err != nil {
		t.Fatal(err)
	}
	r.pause(s) // past the grace
	select {
	case <-l.Done():
	case <-time.After(10 * time.Second):
		t.Fatal("the lease was not ended")
	}
	if _, err := l.Dial(r.ctx(), 80); err == nil {
		t.Error("an ended lease still dials")
	}
	l.Release()

	r.resume(s)
	if l, err = r.m.Acquire(r.ctx(), "i1", deny); err != nil {
		t.Fatal(err)
	}
	hook, reached, release := holding("pause")
	r.w.setHook(hook)
	go l.Release()
	done := make(chan error, 1)
	go func() { _, err := s.Pause(r.ctx()); done <- err }()
	<-reached // the drain is over
	release()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func TestPauseOfWhatDoesNotRun(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	r.pause(s)
	_, err := s.Pause(r.ctx())
	wantCode(t, err, apierr.AlreadyPaused)
	hook, reached, release := holding("restore")
	r.w.setHook(hook)
	go s.Resume(r.ctx(), 0)
	<-reached
	_, err = s.Pause(r.ctx())
	wantCode(t, err, apierr.InTransition)
	release()
}

func TestEndOfTheGuestAndOfTheVMMAreToldApart(t *testing.T) {
	r := newRig(t)
	for id, tc := range map[string]struct {
		end    func(string)
		reason string
	}{
		"i1": {r.w.powerOff, "poweroff"},
		"i2": {r.w.die, "signal: killed"},
	} {
		s := r.create(id)
		r.w.setMemory(id, "old")
		r.pause(s)
		r.resume(s)
		r.w.setMemory(id, "new")
		l, err := r.m.Acquire(r.ctx(), id, deny)
		if err != nil {
			t.Fatal(err)
		}
		tc.end(id)
		v := r.until(s, "stopped", func(v View) bool { return v.VM() == Stopped })
		if !strings.Contains(v.Reason, tc.reason) || v.Envd.State != Absent {
			t.Errorf("%s: reason %q", id, v.Reason)
		}
		<-l.Done()
		l.Release()
		if _, err := r.m.Acquire(r.ctx(), id, allow); !isCode(err, apierr.NotFound) {
			t.Errorf("a request brought an older state back: %v", err)
		}
		v = r.resume(s)
		if r.w.memory(id) != "old" || !r.hasEvent(id, Resuming, "back to snapshot 1") {
			t.Errorf("%s: memory %q, reason %q", id, r.w.memory(id), v.Reason)
		}
	}
}

func TestRequestsAreHeldWhileEnvdIsUnresponsive(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	var mu sync.Mutex
	broken := true
	r.w.setHook(func(_ context.Context, op, _ string) error {
		mu.Lock()
		defer mu.Unlock()
		if broken && (op == "probe" || op == "handshake") {
			return errors.New("no answer")
		}
		return nil
	})
	v := r.until(s, "unresponsive", func(v View) bool { return v.Envd.State == Unresponsive })
	if v.VM() != Running || v.Usable() || !strings.Contains(v.Envd.Error, "no answer") {
		t.Errorf("view %+v", v)
	}
	got := make(chan error, 1)
	var l gateway.Lease
	go func() {
		var err error
		l, err = r.m.Acquire(r.ctx(), "i1", deny)
		got <- err
	}()
	for waiting := 0; waiting == 0; {
		s.do(func() { waiting = len(s.waiters) })
	}
	mu.Lock()
	broken = false
	mu.Unlock()
	if err := <-got; err != nil {
		t.Fatal(err)
	}
	l.Release()
	if v := s.View(); v.Incarnation != 1 {
		t.Errorf("it was restarted: %+v", v)
	}
}

func TestHeldRequestPastItsBudgetIsToldBothStates(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	r.cfg.Budgets.Hold = time.Hour
	r.w.setHook(failing("probe", errors.New("no answer")))
	r.until(s, "unresponsive", func(v View) bool { return v.Envd.State == Unresponsive })
	ctx, cancel := context.WithTimeout(r.ctx(), 20*time.Millisecond)
	defer cancel()
	_, err := r.m.Acquire(ctx, "i1", deny)
	wantCode(t, err, apierr.NotReady)
	if e := apierr.As(err); e.VM != "running" || e.Envd != "unresponsive" || e.RetrySeconds() < 1 {
		t.Errorf("got %+v", e)
	}
}

func TestLostContactIsNoticedByEvent(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	before := r.w.count("handshake")
	r.w.loseContact("i1")
	r.until(s, "ready again", func(v View) bool { return v.Envd.State == Ready && r.w.count("handshake") > before })
	if v := s.View(); v.Incarnation != 1 {
		t.Errorf("incarnation %d", v.Incarnation)
	}
}

func TestFullDiskRefusesCreateAndPauseAndTouchesNothing(t *testing.T) {
	r := newRig(t)
	s := r.create("i1")
	r.layers.fill(true)
	pauses := r.w.count("pause")
	_, err := s.Pause(r.ctx())
	wantCode(t, err, apierr.DiskFull)
	if v := s.View(); !v.Usable() || r.w.count("pause") != pauses {
		t.Errorf("the VM was touched: %+v", v)
	}
	_, err = r.m.Create(r.ctx(), request("i2"))
	wantCode(t, err, apierr.DiskFull)
	r.layers.fill(false)
	r.pause(s)
}
