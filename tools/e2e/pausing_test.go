package e2e

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"torpor/tools/rest"
)

// A request that comes while the sandbox is falling asleep is served, once, whichever way it comes.
func TestRequestsDuringAPauseAreServed(t *testing.T) {
	w := startWitness(t, newSandbox(t, rest.NewSandbox{AutoPause: true, AutoResume: &rest.AutoResume{Enabled: true}}))
	id := w.sb.SandboxID
	const rounds = 3
	caught := 0
	for i := range rounds {
		paused := make(chan error, 1)
		go func() { paused <- sys.Pause(within(t, callLimit), id) }()
		if _, err := sys.WaitState(within(t, waitLimit), id, func(s rest.State) bool { return s.VM.State != "running" }); err != nil {
			t.Fatal(err)
		}
		// At the beginning of the pause, and later and later in it.
		<-time.After(time.Duration(i) * limit(20*time.Millisecond))
		if state(t, id).VM.State == "pausing" {
			caught++
		}
		requests := []func() error{
			func() error { _, _, err := sys.Connect(within(t, callLimit), id, lifetime); return err },
			func() error { _, err := w.ask(within(t, callLimit)); return err },
			func() error {
				_, err := sys.Output(within(t, callLimit), w.sb, fmt.Sprintf("echo %d >> /home/user/served", i))
				return err
			},
		}
		answers := make([]error, len(requests))
		var all sync.WaitGroup
		for n, request := range requests {
			all.Go(func() { answers[n] = request() })
		}
		all.Wait()
		for n, err := range answers {
			if err != nil {
				t.Errorf("round %d, request %d of connect, port, command: %v", i, n, err)
			}
		}
		if err := <-paused; err != nil {
			t.Errorf("round %d: the pause: %v", i, err)
		}
		w.check(t)
	}
	if got, want := output(t, w.sb, "cat /home/user/served"), "0\n1\n2"; got != want {
		t.Errorf("the commands left %q, want %q", got, want)
	}
	t.Logf("%d of %d rounds had their requests while it was pausing", caught, rounds)
	if caught == 0 {
		t.Error("no request came during a pause: it has not tested anything")
	}
}
