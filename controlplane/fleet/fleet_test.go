package fleet_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"torpor/api/agentpb"
	"torpor/api/apierr"
	"torpor/controlplane/fakeagent"
	"torpor/controlplane/fleet"
)

func newNode(t *testing.T, patience time.Duration) (*fakeagent.Agent, *fleet.Node) {
	t.Helper()
	agent := fakeagent.Start(t)
	node := fleet.NewNode(fleet.Config{Socket: agent.Socket, Patience: patience}, zerolog.Nop())
	t.Cleanup(func() { node.Close() })
	return agent, node
}

func TestCallOutlastsARestartOfTheAgent(t *testing.T) {
	agent, node := newNode(t, time.Minute)
	agent.Add(fakeagent.Ready("i1", time.Minute))
	if _, err := node.State(t.Context(), "i1"); err != nil { // over a connection that will be dead
		t.Fatal(err)
	}
	agent.Stop()
	answered := make(chan error, 1)
	go func() { _, _, err := node.Resume(t.Context(), "i1", time.Minute); answered <- err }()
	if err := agent.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-answered; err != nil {
		t.Error(err)
	}
	if got := agent.Changes(); !slices.Equal(got, []string{"Resume i1"}) {
		t.Errorf("%v", got)
	}
}

func TestAgentAwayIsNodeUnreachable(t *testing.T) {
	agent, node := newNode(t, 50*time.Millisecond)
	agent.Stop()
	_, err := node.Create(t.Context(), &agentpb.CreateRequest{SandboxId: "i1"})
	if e := apierr.As(err); e.Code != apierr.NodeUnreachable || e.RetrySeconds() < 1 {
		t.Errorf("%v", err)
	}
	if err := node.Watch(t.Context(), "i1", nil); apierr.As(err).Code != apierr.NodeUnreachable {
		t.Errorf("watch: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := node.List(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("the caller's own end: %v", err)
	}
}

func TestErrorsOfTheAgentComeThroughWhole(t *testing.T) {
	agent, node := newNode(t, time.Second)
	want := apierr.New(apierr.SandboxBroken, "vmstate is damaged").For("i1").With("stopped", "absent")
	agent.Fail("Resume", want)
	_, _, err := node.Resume(t.Context(), "i1", 0)
	if apierr.As(err).Body() != want.Body() {
		t.Errorf("%v", err)
	}
}

func TestSweepEndsOnlyWhatWasDeleted(t *testing.T) {
	agent, node := newNode(t, time.Second)
	for _, id := range []string{"ideleted", "ilive", "istranger"} {
		agent.Add(fakeagent.Ready(id, time.Minute))
	}
	sweeper := fleet.NewSweeper(node, rows{"ideleted": true, "ilive": false}, zerolog.Nop())
	if err := sweeper.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := agent.Changes(); !slices.Equal(got, []string{"Kill ideleted"}) {
		t.Errorf("%v", got)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	sweeper.Run(ctx) // ends with its context
}

type rows map[string]bool

func (r rows) Deleted(_ context.Context, id string) (bool, error)         { return r[id], nil }
func (r rows) SnapshotDeleted(_ context.Context, id string) (bool, error) { return r[id], nil }

func TestLastSeenFollowsTheAgent(t *testing.T) {
	agent, node := newNode(t, time.Second)
	agent.Add(fakeagent.Ready("i1", time.Minute))
	if _, ok := node.LastSeen("i1"); ok {
		t.Error("seen before anybody looked")
	}
	if _, err := node.List(t.Context()); err != nil {
		t.Fatal(err)
	}
	if seen, ok := node.LastSeen("i1"); !ok || seen.Sandbox.GetVm().GetState() != agentpb.VMState_VM_STATE_RUNNING {
		t.Errorf("%v %v", seen, ok)
	}
	agent.Forget("i1")
	if _, err := node.State(t.Context(), "i1"); apierr.As(err).Code != apierr.NotFound {
		t.Error(err)
	}
	if _, ok := node.LastSeen("i1"); ok {
		t.Error("an ended sandbox is still remembered")
	}
	if strings.Contains(strings.Join(agent.Changes(), ""), "i1") {
		t.Error("looking changed something")
	}
}
