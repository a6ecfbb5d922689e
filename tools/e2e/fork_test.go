package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"torpor/tools/rest"
)

// The unmodified SDK forks, keeps snapshots and makes sandboxes of them, while a stream of the parent goes on.
func TestForkAndSnapshotBySDK(t *testing.T) {
	streamed := 0
	script(t, sdkNew, scriptLimit, func(line json.RawMessage) {
		var said struct {
			SandboxID string
			Streamed  int
		}
		decode(t, line, &said)
		if said.SandboxID != "" {
			cleanUp(t, said.SandboxID)
		}
		streamed += said.Streamed
	}, "fork.mjs", "2")
	t.Logf("the parent's stream brought %d lines", streamed)
	if streamed == 0 {
		t.Error("the parent's stream brought nothing: it has not tested anything")
	}
}

// fork asks for count forks and demands all of them.
func fork(t *testing.T, sb rest.Sandbox, count int) []rest.Sandbox {
	t.Helper()
	var answer []struct {
		Sandbox *rest.Sandbox
		Error   json.RawMessage
	}
	body := map[string]int{"count": count, "timeout": int(lifetime.Seconds())}
	if _, err := sys.Do(within(t, callLimit), http.MethodPost, "/sandboxes/"+sb.SandboxID+"/fork", body, &answer); err != nil {
		t.Fatalf("fork: %v", err)
	}
	var children []rest.Sandbox
	for i, a := range answer {
		if a.Sandbox == nil {
			t.Errorf("fork %d: %s", i, a.Error)
			continue
		}
		cleanUp(t, a.Sandbox.SandboxID)
		children = append(children, *a.Sandbox)
	}
	if len(children) != count {
		t.Fatalf("%d forks of %d", len(children), count)
	}
	return children
}

// The forks of a warm guest are that guest, share its memory with it, and from the first moment have numbers, names and a life of their own.
func TestForksOfAWarmGuest(t *testing.T) {
	count := 4
	if *long {
		count = 16
	}
	const ownMiB = 8 // of a fork whose witness has worked since it was made; 6.0 were seen
	parent := startWitness(t, newSandbox(t, rest.NewSandbox{}))
	atFork := parent.last
	children := fork(t, parent.sb, count)
	for i, child := range children {
		own := ownMemory(t, child.SandboxID)
		t.Logf("fork %d has %.1f MiB of its own", i, float64(own)/1024)
		if own > ownMiB<<10 {
			t.Errorf("fork %d has %d KiB of its own, at most %d MiB allowed", i, own, ownMiB)
		}
	}
	const draw = "head -c 16 /dev/urandom | od -An -tx1 | tr -d ' '; cat /proc/sys/kernel/random/uuid"
	var witnesses []*witness
	seen := map[string]string{parent.sb.SandboxID: "the parent", parent.sb.AccessToken: "the parent"}
	note := func(who, what string) {
		if other, ok := seen[what]; ok {
			t.Errorf("%s has %s, and so has %s", who, what, other)
		}
		seen[what] = who
	}
	for i, child := range children {
		who := fmt.Sprintf("fork %d", i)
		note(who, child.SandboxID)
		note(who, child.AccessToken)
		for number := range strings.FieldsSeq(output(t, child, draw)) {
			note(who, number)
		}
		w := &witness{sb: child, last: atFork} // the same process with the same memory
		w.check(t)
		w.check(t)
		witnesses = append(witnesses, w)
	}
	for number := range strings.FieldsSeq(output(t, parent.sb, draw)) {
		note("the parent", number)
	}
	parent.check(t)

	// A fork sleeps and wakes like any other, also without its parent.
	if err := sys.Kill(within(t, callLimit), parent.sb.SandboxID); err != nil {
		t.Errorf("killing the parent: %v", err)
	}
	w := witnesses[0]
	w.check(t)
	pause(t, w.sb.SandboxID)
	w.sb = wake(t, w.sb.SandboxID)
	w.check(t)
}

// ownMemory is what a sandbox's VMM holds of its guest's memory that nobody shares, in KiB: pages written since it was restored.
func ownMemory(t *testing.T, id string) int {
	t.Helper()
	out := hostShell(t, fmt.Sprintf(`awk '/^[0-9a-f]+-[0-9a-f]+ / { guest = index($0, "/var/lib/torpor/") > 0 }
guest && /^Anonymous:/ { own += $2 } END { print own + 0 }' /proc/%s/smaps`, vmmPID(t, id)))
	kib, err := strconv.Atoi(out)
	if err != nil || kib == 0 {
		t.Fatalf("awk said %q", out)
	}
	return kib
}

// The parent of a snapshot stands still for a small part of what a pause of it takes, though it has written a lot.
func TestSnapshotHardlyStopsTheParent(t *testing.T) {
	const dirtyMiB, least = 96, 10
	sb := newSandbox(t, rest.NewSandbox{})
	output(t, sb, fmt.Sprintf("head -c %dM /dev/urandom > /dev/shm/dirt", dirtyMiB))
	w := startWitness(t, sb)
	var kept struct{ SnapshotID string }
	began := time.Now()
	if _, err := sys.Do(within(t, callLimit), http.MethodPost, "/sandboxes/"+sb.SandboxID+"/snapshots", struct{}{}, &kept); err != nil {
		t.Fatalf("snapshot: %v", err)
	}
	whole := time.Since(began)
	w.check(t)
	stopped := phaseOf(t, sb.SandboxID, "stopped")
	pause(t, sb.SandboxID)
	paused := phaseOf(t, sb.SandboxID, "pause") + phaseOf(t, sb.SandboxID, "save")
	t.Logf("%d MiB dirty: it stood still for %v of the %v that a snapshot took, and for %v in a pause", dirtyMiB, stopped, whole, paused)
	if stopped == 0 || stopped*least > paused {
		t.Errorf("it stood still for %v, a pause takes %v", stopped, paused)
	}
	w.sb = wake(t, sb.SandboxID)
	w.check(t)
	if _, err := sys.Do(within(t, callLimit), http.MethodDelete, "/templates/"+kept.SnapshotID, nil, nil); err != nil {
		t.Errorf("deleting the snapshot: %v", err)
	}
}

// phaseOf is how long a phase took the last time that an event told of it.
func phaseOf(t *testing.T, id, phase string) time.Duration {
	t.Helper()
	took := time.Duration(0)
	for _, e := range eventsOf(t, id) {
		if ms := e.PhasesMs[phase]; ms > 0 {
			took = time.Duration(ms * float64(time.Millisecond))
		}
	}
	return took
}
