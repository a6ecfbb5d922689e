package rest

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strings"
	"time"

	"torpor/api/agentpb"
	"torpor/api/apierr"
	"torpor/api/e2b"
	"torpor/controlplane/fleet"
	"torpor/controlplane/reply"
	"torpor/controlplane/store"
)

// stateBody is both truths of one sandbox.
type stateBody struct {
	SandboxID     string        `json:"sandboxID"`
	UserID        string        `json:"userID"`
	TemplateID    string        `json:"templateID"`
	Incarnation   uint64        `json:"incarnation"`
	Public        e2b.State     `json:"public"`
	VM            vmBody        `json:"vm"`
	Envd          envdBody      `json:"envd"`
	Tier          string        `json:"tier"`       // live | frozen | disk
	ResumeMode    string        `json:"resumeMode"` // what this incarnation began from: none | frozen | memory | memory-previous | disk
	NodeID        string        `json:"nodeID"`
	NodeReachable bool          `json:"nodeReachable"`
	ObservedAt    time.Time     `json:"observedAt"`
	StartedAt     *time.Time    `json:"startedAt"`
	EndAt         *time.Time    `json:"endAt"`
	IdleSince     *time.Time    `json:"idleSince"`
	Lifecycle     e2b.Lifecycle `json:"lifecycle"`
	Memory        memoryBody    `json:"memory"`
	Disk          diskBody      `json:"disk"`
}

type vmBody struct {
	State  string     `json:"state"`
	Since  *time.Time `json:"since"`
	Reason string     `json:"reason"`
}

type envdBody struct {
	State       string     `json:"state"`
	Since       *time.Time `json:"since"`
	Version     string     `json:"version"`
	Incarnation uint64     `json:"incarnation"`
	LastOK      *time.Time `json:"lastOK"`
	LatencyMs   float64    `json:"latencyMs"`
	Error       string     `json:"error"`
}

type memoryBody struct {
	GuestBytes    uint64 `json:"guestBytes"`
	ResidentBytes uint64 `json:"residentBytes"`
	SnapshotBytes uint64 `json:"snapshotBytes"`
}

type diskBody struct {
	LayerBytes uint64 `json:"layerBytes"`
}

// state answers the present state, or with watch=true one object a line at every change until the sandbox is removed. When
// the node is away it answers the last known state and says so: nothing is then called running.
func (a *API) state(w http.ResponseWriter, r *http.Request) error {
	row, err := a.find(r)
	if err != nil {
		return err
	}
	seen, reachable, err := a.observe(r.Context(), row.ID)
	if err != nil {
		return err
	}
	switch r.URL.Query().Get("watch") {
	case "", "false":
		reply.JSON(w, http.StatusOK, stateOf(row, seen, reachable))
		return nil
	case "true":
		a.watch(w, r, row)
		return nil
	default:
		return apierr.New(apierr.BadRequest, "query \"watch\" must be true or false")
	}
}

// observe asks the node, and falls back to the last known state when it is away.
func (a *API) observe(ctx context.Context, id string) (seen fleet.Observed, reachable bool, err error) {
	sb, err := a.node.State(ctx, id)
	if err == nil {
		return fleet.Observed{Sandbox: sb, At: time.Now()}, true, nil
	}
	if errors.Is(err, &apierr.Error{Code: apierr.NodeUnreachable}) {
		if seen, ok := a.node.LastSeen(id); ok {
			return seen, false, nil
		}
	}
	return seen, false, err
}

// watch streams states. A node that goes away is a change too; the watch then goes on when it is back.
func (a *API) watch(w http.ResponseWriter, r *http.Request, row store.Sandbox) {
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.WriteHeader(http.StatusOK)
	flush := http.NewResponseController(w)
	send := func(seen fleet.Observed, reachable bool) error {
		line, err := json.Marshal(stateOf(row, seen, reachable))
		if err != nil {
			return err
		}
		if _, err := w.Write(append(line, '\n')); err != nil {
			return err
		}
		return flush.Flush()
	}
	wait := time.NewTicker(time.Second)
	defer wait.Stop()
	for away := false; ; {
		err := a.node.Watch(r.Context(), row.ID, func(sb *agentpb.Sandbox) error {
			away = false
			return send(fleet.Observed{Sandbox: sb, At: time.Now()}, true)
		})
		if !errors.Is(err, &apierr.Error{Code: apierr.NodeUnreachable}) {
			return // removed, refused, or the client has gone
		}
		if seen, ok := a.node.LastSeen(row.ID); ok && !away {
			away = true
			if send(seen, false) != nil {
				return
			}
		}
		select {
		case <-r.Context().Done():
			return
		case <-wait.C:
		}
	}
}

// states lists both truths of every sandbox, ordered and paged by id.
func (a *API) states(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	limit, err := parseLimit(q.Get("limit"), 1000)
	if err != nil {
		return err
	}
	entries, err := a.entries(r.Context(), filter{states: map[e2b.State]bool{e2b.Running: true, e2b.Paused: true}})
	if err != nil {
		return err
	}
	slices.SortFunc(entries, func(x, y entry) int { return strings.Compare(x.row.ID, y.row.ID) })
	answer := struct {
		Sandboxes []stateBody `json:"sandboxes"`
		Next      *string     `json:"next"`
	}{Sandboxes: []stateBody{}}
	now := time.Now()
	for _, e := range entries {
		if e.row.ID <= q.Get("after") {
			continue
		}
		if len(answer.Sandboxes) == limit {
			answer.Next = &answer.Sandboxes[limit-1].SandboxID
			break
		}
		answer.Sandboxes = append(answer.Sandboxes, stateOf(e.row, fleet.Observed{Sandbox: e.sb, At: now}, true))
	}
	reply.JSON(w, http.StatusOK, answer)
	return nil
}

func stateOf(row store.Sandbox, seen fleet.Observed, reachable bool) stateBody {
	sb := seen.Sandbox
	public := publicState(sb)
	if !reachable {
		public = e2b.Paused // nobody can vouch for it
	}
	return stateBody{
		SandboxID: row.ID, UserID: row.UserID, TemplateID: row.TemplateID, Incarnation: sb.Incarnation, Public: public,
		VM: vmBody{State: vmWord(sb), Since: moment(sb.GetVm().GetSince()), Reason: sb.GetVm().GetReason()},
		Envd: envdBody{
			State: envdWord(sb), Since: moment(sb.GetEnvd().GetSince()), Version: sb.GetEnvd().GetVersion(),
			Incarnation: sb.GetEnvd().GetIncarnation(), LastOK: moment(sb.GetEnvd().GetLastOk()),
			LatencyMs: sb.GetEnvd().GetLatencyMs(), Error: sb.GetEnvd().GetError(),
		},
		Tier: tierWord(sb), ResumeMode: resumeModes[sb.GetResumeMode()], NodeID: row.NodeID, NodeReachable: reachable, ObservedAt: seen.At.UTC(),
		StartedAt: moment(sb.StartedAt), EndAt: moment(sb.EndAt), Lifecycle: lifecycleOf(sb),
		Memory: memoryBody{GuestBytes: sb.MemoryBytes, ResidentBytes: sb.ResidentBytes, SnapshotBytes: sb.SnapshotBytes},
		Disk:   diskBody{LayerBytes: sb.LayerBytes},
	}
}

// resumeModes are the API's words; an agent that says nothing has none.
var resumeModes = map[agentpb.ResumeMode]string{
	agentpb.ResumeMode_RESUME_MODE_UNSPECIFIED: "none",
	agentpb.ResumeMode_RESUME_MODE_NONE:        "none",
	agentpb.ResumeMode_RESUME_MODE_FROZEN:      "frozen",
	agentpb.ResumeMode_RESUME_MODE_MEMORY:      "memory",
	agentpb.ResumeMode_RESUME_MODE_PREVIOUS:    "memory-previous",
	agentpb.ResumeMode_RESUME_MODE_COLD:        "disk",
}

func tierWord(sb *agentpb.Sandbox) string {
	return strings.ToLower(strings.TrimPrefix(sb.GetTier().String(), "TIER_"))
}

// vmWord and envdWord spell the agent's enums as the API does: "VM_STATE_RUNNING" is running.
func vmWord(sb *agentpb.Sandbox) string {
	return strings.ToLower(strings.TrimPrefix(sb.GetVm().GetState().String(), "VM_STATE_"))
}

func envdWord(sb *agentpb.Sandbox) string {
	return strings.ToLower(strings.TrimPrefix(sb.GetEnvd().GetState().String(), "ENVD_STATE_"))
}

// moment is null for "none".
func moment(ms int64) *time.Time {
	if ms == 0 {
		return nil
	}
	t := millis(ms)
	return &t
}
