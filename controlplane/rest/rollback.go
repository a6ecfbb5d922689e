package rest

import (
	"net/http"
	"slices"
	"time"

	"torpor/api/apierr"
	"torpor/controlplane/fleet"
	"torpor/controlplane/reply"
	"torpor/controlplane/store"
)

// snapshotBody is a snapshot in /v1.
type snapshotBody struct {
	SnapshotID  string    `json:"snapshotID"`
	Names       []string  `json:"names"`
	SandboxID   string    `json:"sandboxID"`
	TemplateID  string    `json:"templateID"` // of the sandbox
	CreatedAt   time.Time `json:"createdAt"`
	SizeBytes   uint64    `json:"sizeBytes"` // as allocated; may be shared with the sandbox and with other snapshots
	CPUCount    uint32    `json:"cpuCount"`
	MemoryMB    uint64    `json:"memoryMB"`
	DiskSizeMB  uint64    `json:"diskSizeMB"`
	EnvdVersion string    `json:"envdVersion"`
	NodeID      string    `json:"nodeID"`
}

// sandboxSnapshots lists the snapshots of a sandbox, newest first. They outlive it, and so does this list.
func (a *API) sandboxSnapshots(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	limit, err := parseLimit(q.Get("limit"), 1000)
	if err != nil {
		return err
	}
	found, kept, err := a.snapshots(r.Context(), r.PathValue("sandboxID"), "")
	if err != nil {
		return err
	}
	if len(found) == 0 { // of a sandbox that is there, or of none
		if _, err := a.find(r); err != nil {
			return err
		}
	}
	answer := struct {
		Snapshots []snapshotBody `json:"snapshots"`
		Next      *string        `json:"next"`
	}{Snapshots: []snapshotBody{}}
	if after := q.Get("after"); after != "" {
		i := slices.IndexFunc(found, func(s store.Snapshot) bool { return s.ID == after })
		if i < 0 {
			return apierr.New(apierr.BadRequest, "query \"after\" is not the id of one of these snapshots")
		}
		found = found[i+1:]
	}
	for _, s := range found[:min(limit, len(found))] {
		k := kept[s.ID]
		answer.Snapshots = append(answer.Snapshots, snapshotBody{
			SnapshotID: s.ID, Names: namesOf(s), SandboxID: s.SandboxID, TemplateID: s.TemplateID, CreatedAt: s.CreatedAt,
			SizeBytes: k.SizeBytes, CPUCount: k.Vcpus, MemoryMB: k.MemoryBytes >> 20, DiskSizeMB: k.DiskBytes >> 20,
			EnvdVersion: k.EnvdVersion, NodeID: s.NodeID,
		})
	}
	if len(found) > limit {
		answer.Next = &answer.Snapshots[limit-1].SnapshotID
	}
	reply.JSON(w, http.StatusOK, answer)
	return nil
}

// rollback takes a sandbox back to one of its own snapshots and answers its state then: ready if it ran, else still paused.
func (a *API) rollback(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		SnapshotID string `json:"snapshotID"`
	}
	if err := decode(r, &req); err != nil {
		return err
	}
	if req.SnapshotID == "" {
		return apierr.New(apierr.BadRequest, "field \"snapshotID\" is required")
	}
	row, _, err := a.look(r)
	if err != nil {
		return err
	}
	snapshot, err := a.snapshot(r.Context(), req.SnapshotID)
	if err == nil && snapshot.SandboxID != row.ID { // another's is not told from one that does not exist
		err = noSnapshot(req.SnapshotID)
	}
	if err != nil {
		return err
	}
	ctx, cancel := mustFinish(r)
	defer cancel()
	sb, err := a.node.Rollback(ctx, row.ID, snapshot.ID)
	if err != nil {
		return err
	}
	reply.JSON(w, http.StatusOK, stateOf(row, fleet.Observed{Sandbox: sb, At: time.Now()}, true))
	return nil
}
