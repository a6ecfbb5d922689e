package sandbox

import (
	"path/filepath"
	"time"

	"torpor/agent/snapcache"
	"torpor/agent/store"
)

// EnvdStatus is what is known of envd.
type EnvdStatus struct {
	State       EnvdState
	Since       time.Time
	Version     string
	Incarnation uint64 // of the last completed handshake
	LastOK      time.Time
	Latency     time.Duration // of the last probe that was answered
	Error       string        // of the last probe, empty if it was answered
}

// as is the status of an envd that has not been heard of since: what was known of it stays, but the last probe's result.
func (e EnvdStatus) as(state EnvdState) EnvdStatus {
	return EnvdStatus{State: state, Since: e.Since, Version: e.Version, Incarnation: e.Incarnation, LastOK: e.LastOK}
}

// View is a sandbox at one instant. It is a copy: the reader may keep it.
type View struct {
	store.Sandbox
	Envd          EnvdStatus
	ResidentBytes uint64
	SnapshotBytes uint64
	LayerBytes    uint64
	Tier          string // live | frozen | disk
}

// VM returns the VM's state.
func (v View) VM() VMState { return VMState(v.State) }

// Usable reports whether the sandbox is what the public API calls running.
func (v View) Usable() bool {
	return v.VM() == Running && v.Envd.State == Ready && v.Envd.Incarnation == v.Incarnation
}

// View returns the sandbox as it is now. It never waits.
func (s *Sandbox) View() View {
	v := *s.view.Load()
	for _, l := range v.Layers {
		v.LayerBytes += snapcache.Allocated(filepath.Join(s.paths.layers(), l))
	}
	return v
}

// publish makes the owner's fields visible. Owner only.
func (s *Sandbox) publish() {
	v := &View{Sandbox: s.rec.Clone(), Envd: s.envd, ResidentBytes: s.resident, SnapshotBytes: s.snapshotBytes, Tier: s.tier()}
	v.Token, v.Env = "", nil // secrets stay inside
	s.view.Store(v)
	s.m.hub.changed(s.id)
}
