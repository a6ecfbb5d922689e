package rpc

import (
	"math"
	"time"

	"torpor/agent/sandbox"
	"torpor/api/agentpb"
)

var vmStates = map[sandbox.VMState]agentpb.VMState{
	sandbox.Creating: agentpb.VMState_VM_STATE_CREATING,
	sandbox.Running:  agentpb.VMState_VM_STATE_RUNNING,
	sandbox.Pausing:  agentpb.VMState_VM_STATE_PAUSING,
	sandbox.Paused:   agentpb.VMState_VM_STATE_PAUSED,
	sandbox.Resuming: agentpb.VMState_VM_STATE_RESUMING,
	sandbox.Stopping: agentpb.VMState_VM_STATE_STOPPING,
	sandbox.Stopped:  agentpb.VMState_VM_STATE_STOPPED,
	sandbox.Failed:   agentpb.VMState_VM_STATE_FAILED,
}

var envdStates = map[sandbox.EnvdState]agentpb.EnvdState{
	sandbox.Absent:       agentpb.EnvdState_ENVD_STATE_ABSENT,
	sandbox.Starting:     agentpb.EnvdState_ENVD_STATE_STARTING,
	sandbox.Ready:        agentpb.EnvdState_ENVD_STATE_READY,
	sandbox.Unresponsive: agentpb.EnvdState_ENVD_STATE_UNRESPONSIVE,
}

var tiers = map[string]agentpb.Tier{
	sandbox.TierLive: agentpb.Tier_TIER_LIVE, sandbox.TierFrozen: agentpb.Tier_TIER_FROZEN, sandbox.TierDisk: agentpb.Tier_TIER_DISK,
}

var resumeModes = map[string]agentpb.ResumeMode{
	sandbox.ModeNone:     agentpb.ResumeMode_RESUME_MODE_NONE,
	sandbox.ModeFrozen:   agentpb.ResumeMode_RESUME_MODE_FROZEN,
	sandbox.ModeMemory:   agentpb.ResumeMode_RESUME_MODE_MEMORY,
	sandbox.ModePrevious: agentpb.ResumeMode_RESUME_MODE_PREVIOUS,
	sandbox.ModeCold:     agentpb.ResumeMode_RESUME_MODE_COLD,
}

func answer(v sandbox.View, err error) (*agentpb.Sandbox, error) {
	if err != nil {
		return nil, err
	}
	return message(v), nil
}

func message(v sandbox.View) *agentpb.Sandbox {
	return &agentpb.Sandbox{
		SandboxId: v.ID, TemplateId: v.TemplateID, Incarnation: v.Incarnation,
		Vm: &agentpb.VM{State: vmStates[v.VM()], Since: millis(v.Since), Reason: v.Reason},
		Envd: &agentpb.Envd{
			State: envdStates[v.Envd.State], Since: millis(v.Envd.Since), Version: v.EnvdVersion, Incarnation: v.Envd.Incarnation,
			LastOk: millis(v.Envd.LastOK), LatencyMs: float64(v.Envd.Latency.Microseconds()) / 1000, Error: v.Envd.Error,
		},
		StartedAt: millis(v.StartedAt), CreatedAt: millis(v.CreatedAt), EndAt: millis(v.EndAt),
		Lifecycle:      &agentpb.Lifecycle{OnTimeout: v.OnTimeout, AutoResume: v.AutoResume},
		TimeoutSeconds: int64(v.Timeout / time.Second),
		Vcpus:          v.VCPUs, MemoryBytes: v.MemoryBytes, DiskBytes: v.DiskBytes,
		ResidentBytes: v.ResidentBytes, SnapshotBytes: v.SnapshotBytes, LayerBytes: v.LayerBytes, Generation: v.Generation,
		Tier: tiers[v.Tier], ResumeMode: resumeModes[v.ResumeMode],
	}
}

// seconds converts without overflow: a number beyond what a Duration holds becomes the longest one.
func seconds(n int64) time.Duration {
	if n > math.MaxInt64/int64(time.Second) {
		return math.MaxInt64
	}
	return time.Duration(n) * time.Second
}

// millis is the contract's form of a time: unix milliseconds, 0 for none.
func millis(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}
