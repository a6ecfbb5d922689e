package rpc

import (
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"

	"torpor/agent/sandbox"
	"torpor/agent/store"
	"torpor/api/agentpb"
)

func TestEveryStateHasAName(t *testing.T) {
	seen := map[agentpb.VMState]bool{}
	for _, s := range sandbox.States {
		m := vmStates[s]
		if m == agentpb.VMState_VM_STATE_UNSPECIFIED || seen[m] {
			t.Errorf("%s becomes %s", s, m)
		}
		seen[m] = true
	}
	for _, s := range []sandbox.EnvdState{sandbox.Absent, sandbox.Starting, sandbox.Ready, sandbox.Unresponsive} {
		if envdStates[s] == agentpb.EnvdState_ENVD_STATE_UNSPECIFIED {
			t.Errorf("envd %s has no name", s)
		}
	}
}

func TestEveryTierAndModeHasAName(t *testing.T) {
	for _, tier := range []string{sandbox.TierLive, sandbox.TierFrozen, sandbox.TierDisk} {
		if tiers[tier] == agentpb.Tier_TIER_UNSPECIFIED {
			t.Errorf("tier %s has no name", tier)
		}
	}
	for _, mode := range []string{sandbox.ModeNone, sandbox.ModeFrozen, sandbox.ModeMemory, sandbox.ModePrevious, sandbox.ModeCold} {
		if resumeModes[mode] == agentpb.ResumeMode_RESUME_MODE_UNSPECIFIED {
			t.Errorf("mode %s has no name", mode)
		}
	}
}

func TestMessageCarriesEverything(t *testing.T) {
	at := time.UnixMilli(1_700_000_000_123)
	m := message(sandbox.View{
		Sandbox: store.Sandbox{
			ID: "i1", TemplateID: "base", Incarnation: 7, State: "running", Reason: "r", Since: at, StartedAt: at, CreatedAt: at, EndAt: at,
			OnTimeout: "pause", AutoResume: true, Timeout: 300 * time.Second, VCPUs: 2, MemoryBytes: 3, DiskBytes: 4, Generation: 5, EnvdVersion: "v",
			ResumeMode: sandbox.ModePrevious,
		},
		Envd:          sandbox.EnvdStatus{State: sandbox.Ready, Since: at, Incarnation: 7, LastOK: at, Latency: 1500 * time.Microsecond, Error: "e"},
		ResidentBytes: 6, SnapshotBytes: 8, LayerBytes: 9, Tier: sandbox.TierFrozen,
	})
	r := m.ProtoReflect()
	for i := range r.Descriptor().Fields().Len() {
		if f := r.Descriptor().Fields().Get(i); !r.Has(f) {
			t.Errorf("%s is not set", f.Name())
		}
	}
	if m.Envd.LatencyMs != 1.5 || m.EndAt != at.UnixMilli() || m.TimeoutSeconds != 300 || m.Envd.Version != "v" {
		t.Errorf("got %v", m)
	}
}

func TestSecondsDoNotOverflow(t *testing.T) {
	for in, want := range map[int64]time.Duration{0: 0, 1: time.Second, -1: -time.Second, math.MaxInt64: math.MaxInt64} {
		if got := seconds(in); got != want {
			t.Errorf("seconds(%d) = %d", in, got)
		}
	}
}

func TestReadTail(t *testing.T) {
	path := filepath.Join(t.TempDir(), "console.log")
	if err := os.WriteFile(path, []byte("0123456789"), 0o600); err != nil {
		t.Fatal(err)
	}
	for limit, want := range map[int64]string{3: "789", 10: "0123456789", 100: "0123456789"} {
		if got, err := readTail(path, limit); err != nil || string(got) != want {
			t.Errorf("limit %d: %q, %v", limit, got, err)
		}
	}
}
