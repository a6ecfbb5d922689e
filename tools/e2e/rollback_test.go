package e2e

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"testing"

	"torpor/tools/rest"
)

// snapshot keeps a sandbox's present state and sees to it that it goes when the test ends.
func snapshot(t *testing.T, id string) string {
	t.Helper()
	kept, err := sys.CreateSnapshot(within(t, callLimit), id, "")
	if err != nil {
		t.Fatalf("snapshot: %v", err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), limit(callLimit))
		defer cancel()
		if err := sys.DeleteSnapshot(ctx, kept.SnapshotID); err != nil && rest.StatusOf(err) != http.StatusNotFound {
			t.Errorf("deleting snapshot %s: %v", kept.SnapshotID, err)
		}
	})
	return kept.SnapshotID
}

func rollback(t *testing.T, id, snapshotID string) rest.State {
	t.Helper()
	s, err := sys.Rollback(within(t, callLimit), id, snapshotID)
	if err != nil {
		t.Fatalf("rollback: %v", err)
	}
	return s
}

// backAt demands the memory and the disk of a moment: the same process, no older than then and no younger than later, all it keeps in
// every place as it left it, and the file that tells the moments apart.
func backAt(t *testing.T, w *witness, then, later testimony, moment string) testimony {
	t.Helper()
	now, err := w.ask(within(t, callLimit))
	if err != nil {
		t.Fatal(err)
	}
	if now.Nonce != then.Nonce || now.PID != then.PID || now.Block != then.Block || len(now.Wrong) > 0 {
		t.Errorf("the memory is not that of then: %+v, then %+v", now, then)
	}
	if now.Count < then.Count || now.Count >= later.Count {
		t.Errorf("the counter says %d, it was %d then and %d later", now.Count, then.Count, later.Count)
	}
	if got := output(t, w.sb, "cat ~/moment"); got != moment {
		t.Errorf("the disk is that of %q, not of %q", got, moment)
	}
	return now
}

// A rollback brings back the memory and the disk of a snapshot, of a running sandbox and of a paused one, as often as one likes.
func TestRollback(t *testing.T) {
	sb := newSandbox(t, rest.NewSandbox{})
	id := sb.SandboxID
	w := startWitness(t, sb)
	set := func(moment string) testimony {
		t.Helper()
		output(t, sb, "echo "+moment+" > ~/moment")
		// What comes after must be told from what came before by the counter: it takes a while until that has gone on enough.
		said, err := w.ask(within(t, callLimit))
		if err != nil {
			t.Fatal(err)
		}
		return said
	}
	pass := func() {
		t.Helper()
		output(t, sb, "sleep 5")
	}
	one := set("one")
	first := snapshot(t, id)
	pass()
	two := set("two")
	second := snapshot(t, id)
	pass()
	three := set("three")

	if s := rollback(t, id, first); s.Public != "running" {
		t.Errorf("it ran, and is %s after the rollback", s.Public)
	}
	backAt(t, w, one, two, "one")
	rollback(t, id, second) // forward
	backAt(t, w, two, three, "two")

	pause(t, id)
	if s := rollback(t, id, first); s.Public != "paused" || s.VM.State != "paused" {
		t.Errorf("it was paused, and is %s after the rollback", s.VM.State)
	}
	w.sb = wake(t, id)
	back := backAt(t, w, one, two, "one")
	pause(t, id) // what was rolled back sleeps and wakes like any other
	w.sb = wake(t, id)
	if again, err := w.ask(within(t, callLimit)); err != nil || again.Nonce != back.Nonce || again.Count < back.Count || len(again.Wrong) > 0 {
		t.Errorf("after a sleep: %+v, before %+v: %v", again, back, err)
	}

	// Another sandbox's snapshots are not there.
	other := newSandbox(t, rest.NewSandbox{})
	if _, err := sys.Rollback(within(t, callLimit), other.SandboxID, first); rest.StatusOf(err) != http.StatusNotFound {
		t.Errorf("rolled back to another's snapshot: %v", err)
	}
}

// A snapshot needs no sandbox: it outlives the one it was taken of, and what is made from it outlives it. All by the CLI.
func TestSnapshotsStandAlone(t *testing.T) {
	cli := func(args ...string) string {
		t.Helper()
		code, stdout, stderr := torpor(t, "", args...)
		if code != 0 {
			t.Fatalf("torpor %v: %d %s", args, code, stderr)
		}
		return strings.TrimSpace(stdout)
	}
	sb := newSandbox(t, rest.NewSandbox{})
	w := startWitness(t, sb)
	snapshotID := cli("snapshot", "create", sb.SandboxID, "--name", "e2e-alone")
	defer func() { _ = sys.DeleteSnapshot(t.Context(), snapshotID) }() // gone already if all went well
	if list := cli("snapshot", "list", sb.SandboxID); !strings.Contains(list, snapshotID) || !strings.Contains(list, "e2e-alone:default") {
		t.Errorf("list said %s", list)
	}
	cli("kill", sb.SandboxID)
	if list := cli("snapshot", "list"); !strings.Contains(list, snapshotID) {
		t.Errorf("it went with its sandbox: %s", list)
	}
	made := newSandbox(t, rest.NewSandbox{TemplateID: "e2e-alone"})
	if made.TemplateID != snapshotID {
		t.Errorf("it says it was made from %s", made.TemplateID)
	}
	cli("snapshot", "rm", "e2e-alone")
	if code, _, stderr := torpor(t, "", "snapshot", "rm", "e2e-alone"); code == 0 || !strings.Contains(stderr, "not found") {
		t.Errorf("removing it again: %d %s", code, stderr)
	}
	child := &witness{sb: made, last: w.last}
	child.check(t)
	pause(t, made.SandboxID)
	child.sb = wake(t, made.SandboxID)
	child.check(t)

	forks := strings.Fields(cli("fork", made.SandboxID, "-n", "2"))
	for _, id := range forks {
		cleanUp(t, id)
	}
	if len(forks) != 2 || slices.Contains(forks, made.SandboxID) {
		t.Errorf("forks %v", forks)
	}
}
