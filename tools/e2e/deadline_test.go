package e2e

import (
	"encoding/json"
	"net/http"
	"testing"
	"time"

	"torpor/tools/rest"
)

func TestDeadlineKills(t *testing.T) {
	sb := newSandbox(t, rest.NewSandbox{})
	if err := sys.SetTimeout(within(t, callLimit), sb.SandboxID, time.Second); err != nil {
		t.Fatal(err)
	}
	err := sys.WatchState(within(t, waitLimit), sb.SandboxID, func(json.RawMessage) bool { return true }) // ends when it is gone
	if err != nil && rest.StatusOf(err) != http.StatusNotFound {
		t.Fatalf("waiting for the end: %v", err)
	}
	_, err = sys.Get(within(t, callLimit), sb.SandboxID)
	wantError(t, err, http.StatusNotFound)
	events := eventsOf(t, sb.SandboxID)
	if len(events) == 0 || events[len(events)-1].Reason == "" {
		t.Errorf("the log does not tell why it ended: %+v", events)
	}
}

func TestDeadlinePauses(t *testing.T) {
	sb := newSandbox(t, rest.NewSandbox{AutoPause: true})
	before := keepMemory(t, sb, 1)
	if err := sys.SetTimeout(within(t, callLimit), sb.SandboxID, time.Second); err != nil {
		t.Fatal(err)
	}
	s, err := sys.WaitState(within(t, waitLimit), sb.SandboxID, func(s rest.State) bool { return s.VM.State == "paused" })
	if err != nil {
		t.Fatal(err)
	}
	if s.Public != "paused" || s.VM.Reason == "" {
		t.Errorf("paused by its deadline: %+v", s)
	}
	if _, err := sys.Processes(within(t, callLimit), sb); err == nil {
		t.Error("a sandbox without auto-resume was woken by a request")
	}
	sameMemory(t, wake(t, sb.SandboxID), before)
}

func TestConnectNeverShortensTheDeadline(t *testing.T) {
	sb := newSandbox(t, rest.NewSandbox{})
	before := state(t, sb.SandboxID).EndAt
	if _, resumed, err := sys.Connect(within(t, callLimit), sb.SandboxID, time.Minute); err != nil || resumed {
		t.Fatalf("resumed %v, %v", resumed, err)
	}
	if after := state(t, sb.SandboxID).EndAt; !after.Equal(before) {
		t.Errorf("connect for a minute moved the end from %v to %v", before, after)
	}
	if _, _, err := sys.Connect(within(t, callLimit), sb.SandboxID, 2*lifetime); err != nil {
		t.Fatal(err)
	}
	if after := state(t, sb.SandboxID).EndAt; !after.After(before.Add(lifetime / 2)) {
		t.Errorf("connect for two hours left the end at %v", after)
	}
}
