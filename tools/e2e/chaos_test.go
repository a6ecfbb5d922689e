package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"torpor/tools/rest"
)

// Whatever is killed, and whenever, a sandbox comes back as it was, or as it was at an earlier sleep, and says so. It is never stuck, never
// two, and can be deleted.
func TestKillsAtRandom(t *testing.T) {
	rounds := 6
	if *long {
		rounds = 24
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	w := startWitness(t, newSandbox(t, rest.NewSandbox{}))
	id := w.sb.SandboxID
	floor, began := w.last.Count, time.Now()
	pause(t, id) // there has to be an earlier sleep
	w.sb = wake(t, id)
	cycle := time.Since(began)
	w.check(t)
	kills := []struct{ name, line string }{
		{"the VMM", killVMM(id)}, {"the agent", "kill -9 $(pidof torpor-agent)"}, {"both", killVMM(id) + "; kill -9 $(pidof torpor-agent)"},
	}
	for i := range rounds {
		kill := kills[i%len(kills)]
		after := time.Duration(random.Int64N(int64(cycle)))
		at := state(t, id)
		cycled := make(chan error, 1)
		go func() { cycled <- pauseAndWake(within(t, callLimit), id) }()
		<-time.After(after)
		s, err := sys.State(within(t, callLimit), id)
		hostShell(t, kill.line+"; true")
		cut := <-cycled
		t.Logf("round %d: %s killed after %v of %v (vm %s, %v); pause and wake: %v", i, kill.name, after, cycle, s.VM.State, err, cut)
		bringBack(t, w, floor, at.Incarnation)
		if t.Failed() {
			return
		}
		if i%3 == 2 { // a new sleep to come back to
			floor = w.last.Count
			pause(t, id)
			w.sb = wake(t, id)
			w.check(t)
		}
	}
	hostShell(t, killVMM(id))
	if err := sys.Kill(within(t, callLimit), id); err != nil {
		t.Errorf("DELETE: %v", err)
	}
}

// killVMM ends the process of a sandbox, if there is one.
func killVMM(id string) string {
	return fmt.Sprintf(`for p in $(pidof torpor-vmm); do tr '\0' ' ' < /proc/$p/cmdline 2>/dev/null | grep -q '/%s ' && kill -9 $p; done; true`, id)
}

func pauseAndWake(ctx context.Context, id string) error {
	if err := sys.Pause(ctx, id); err != nil {
		return err
	}
	_, _, err := sys.Connect(ctx, id, lifetime)
	return err
}

// bringBack connects until the sandbox is there, and demands that it is the one it was: at least as far as at the last sleep, and if not
// as far as it came, that this is said.
func bringBack(t *testing.T, w *witness, floor int, incarnation uint64) {
	t.Helper()
	id := w.sb.SandboxID
	eventually(t, recoverLimit, "the sandbox comes back", func(ctx context.Context) error {
		sb, _, err := sys.Connect(ctx, id, lifetime)
		if err == nil {
			w.sb = sb
		}
		return err
	})
	said, err := w.ask(within(t, callLimit))
	if err != nil {
		t.Fatalf("asking the witness: %v", err)
	}
	vmmPID(t, id) // there is one, and it is one
	fellBack := false
	for _, e := range eventsOf(t, id) {
		if e.Incarnation > incarnation && e.Type == "vm" && strings.Contains(e.Reason, "back to snapshot") {
			fellBack = true
		}
	}
	if fellBack { // then it may be where it was at the last sleep
		w.last = testimony{Nonce: w.last.Nonce, PID: w.last.PID, Block: w.last.Block, Count: floor - 1}
	}
	for _, wrong := range w.judge(said) {
		t.Error(wrong)
	}
	w.last = said
}
