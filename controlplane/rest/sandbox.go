package rest

import (
	"cmp"
	"net/http"
	"time"

	"torpor/api/agentpb"
	"torpor/api/e2b"
	"torpor/controlplane/reply"
)

// get answers one sandbox. It never wakes it and never moves its deadline.
func (a *API) get(w http.ResponseWriter, r *http.Request) error {
	row, sb, err := a.look(r)
	if err != nil {
		return err
	}
	noNetwork := false
	reply.JSON(w, http.StatusOK, e2b.SandboxDetail{
		ListedSandbox:       listedSandbox(entry{row, sb}),
		EnvdAccessToken:     row.AccessToken,
		Domain:              a.domain(),
		AllowInternetAccess: &noNetwork,
		Lifecycle:           lifecycleOf(sb),
	})
	return nil
}

func listed(entries []entry) []e2b.ListedSandbox {
	list := make([]e2b.ListedSandbox, len(entries)) // never null
	for i, e := range entries {
		list[i] = listedSandbox(e)
	}
	return list
}

func listedSandbox(e entry) e2b.ListedSandbox {
	return e2b.ListedSandbox{
		TemplateID: e.row.TemplateID, SandboxID: e.row.ID, ClientID: e2b.ClientID, Alias: e.row.TemplateID,
		StartedAt: startedAt(e.sb), EndAt: endAt(e.sb),
		CPUCount: e.sb.Vcpus, MemoryMB: e.sb.MemoryBytes >> 20, DiskSizeMB: e.sb.DiskBytes >> 20,
		Metadata: e.row.Metadata, State: publicState(e.sb), EnvdVersion: e.sb.GetEnvd().GetVersion(),
	}
}

func lifecycleOf(sb *agentpb.Sandbox) e2b.Lifecycle {
	onTimeout := sb.GetLifecycle().GetOnTimeout()
	if onTimeout == "" {
		onTimeout = "kill"
	}
	return e2b.Lifecycle{OnTimeout: onTimeout, AutoResume: sb.GetLifecycle().GetAutoResume()}
}

// startedAt is the start of the run; while there has been none, the creation.
func startedAt(sb *agentpb.Sandbox) time.Time {
	return millis(cmp.Or(sb.StartedAt, sb.CreatedAt))
}

// endAt is the deadline or the time of the pause; for what has neither, the last change.
func endAt(sb *agentpb.Sandbox) time.Time {
	return millis(cmp.Or(sb.EndAt, sb.GetVm().GetSince()))
}

// millis turns the agent's time into ours.
func millis(ms int64) time.Time { return time.UnixMilli(ms).UTC() }
