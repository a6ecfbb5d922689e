// Package rest serves the REST routes: E2B's control plane (create, connect, list, pause, ...) and Torpor's own under /v1.
// One file per resource. Sandbox traffic is not here but in controlplane/edge.
//
// A handler validates everything before it changes anything. What runs is always asked of the agent; the store is asked
// for what should exist. Lists and gets never touch a sandbox.
package rest

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/rs/zerolog"

	"torpor/api/agentpb"
	"torpor/api/apierr"
	"torpor/api/e2b"
	"torpor/controlplane/auth"
	"torpor/controlplane/fleet"
	"torpor/controlplane/store"
)

// Config holds what an operator may choose.
type Config struct {
	Domain     string        // of sandbox host names; empty: no domain in answers
	MaxTimeout time.Duration // longest time a sandbox may be given at once
	Version    string
}

// API is the REST handler. It is safe for concurrent use.
type API struct {
	cfg    Config
	store  *store.Store
	node   *fleet.Node
	keys   *auth.Keys
	log    zerolog.Logger
	routes []route

	dataPlane fleet.DataPlane
}

// New returns the REST handler.
func New(cfg Config, s *store.Store, node *fleet.Node, dp fleet.DataPlane, keys *auth.Keys, log zerolog.Logger) *API {
	a := &API{cfg: cfg, store: s, node: node, dataPlane: dp, keys: keys, log: log}
	a.routes = a.table()
	return a
}

// table lists every route; the first line that fits a request serves it.
func (a *API) table() []route {
	routes := append(notYet(), []route{
		newRoute("POST", "/sandboxes", a.create),
		newRoute("POST", "/v2/sandboxes", a.create),
		newRoute("GET", "/sandboxes", a.listV1),
		newRoute("GET", "/v2/sandboxes", a.listV2),
		newRoute("GET", "/sandboxes/{sandboxID}", a.get),
		newRoute("DELETE", "/sandboxes/{sandboxID}", a.remove),
		newRoute("POST", "/sandboxes/{sandboxID}/connect", a.connectV1),
		newRoute("POST", "/v2/sandboxes/{sandboxID}/connect", a.connectV2),
		newRoute("POST", "/sandboxes/{sandboxID}/resume", a.resume),
		newRoute("POST", "/sandboxes/{sandboxID}/pause", a.pause),
		newRoute("POST", "/sandboxes/{sandboxID}/timeout", a.setTimeout),
		newRoute("POST", "/sandboxes/{sandboxID}/refreshes", a.refresh),
		newRoute("POST", "/sandboxes/{sandboxID}/fork", a.fork),
		newRoute("POST", "/sandboxes/{sandboxID}/snapshots", a.keepSnapshot),
		newRoute("GET", "/snapshots", a.listSnapshots),
		newRoute("DELETE", "/templates/{templateID}", a.removeTemplate),

		newRoute("GET", "/v1/sandboxes", a.states),
		newRoute("GET", "/v1/sandboxes/{sandboxID}/state", a.state),
		newRoute("GET", "/v1/sandboxes/{sandboxID}/events", a.events),
		newRoute("GET", "/v1/sandboxes/{sandboxID}/console", a.console),
		newRoute("POST", "/v1/sandboxes/{sandboxID}/exec", a.exec),
		newRoute("GET", "/v1/sandboxes/{sandboxID}/snapshots", a.sandboxSnapshots),
		newRoute("POST", "/v1/sandboxes/{sandboxID}/rollback", a.rollback),
		newRoute("GET", "/v1/nodes", a.nodes),
	}...)
	health := newRoute("GET", "/v1/health", a.health)
	health.open = true
	return append(routes, health)
}

// find returns the row of the request's sandbox, or one and the same 404 for every id that is not the caller's.
func (a *API) find(r *http.Request) (store.Sandbox, error) {
	row, err := a.store.Get(r.Context(), r.PathValue("sandboxID"))
	if errors.Is(err, store.ErrNotFound) {
		return row, notFound(r.PathValue("sandboxID"))
	}
	return row, err
}

// look returns row and present state of the request's sandbox; 404 also for one that its node no longer has.
func (a *API) look(r *http.Request) (store.Sandbox, *agentpb.Sandbox, error) {
	row, err := a.find(r)
	if err != nil {
		return row, nil, err
	}
	sb, err := a.node.State(r.Context(), row.ID)
	if err == nil && sb.GetVm().GetState() == agentpb.VMState_VM_STATE_STOPPING {
		err = notFound(row.ID)
	}
	return row, sb, err
}

func notFound(id string) error {
	return apierr.New(apierr.NotFound, "sandbox %q not found", id).For(id)
}

// publicState is running only if the VM runs and envd answered in this incarnation.
func publicState(sb *agentpb.Sandbox) e2b.State {
	if sb.GetVm().GetState() == agentpb.VMState_VM_STATE_RUNNING &&
		sb.GetEnvd().GetState() == agentpb.EnvdState_ENVD_STATE_READY &&
		sb.GetEnvd().GetIncarnation() == sb.GetIncarnation() {
		return e2b.Running
	}
	return e2b.Paused
}

// requireReady guards the answers that promise a ready sandbox.
func requireReady(sb *agentpb.Sandbox) error {
	if publicState(sb) == e2b.Running {
		return nil
	}
	return apierr.New(apierr.NotReady, "the sandbox is not ready: its VM is %s, its envd is %s",
		vmWord(sb), envdWord(sb)).For(sb.GetSandboxId()).With(vmWord(sb), envdWord(sb))
}

// mustFinish detaches work from the client's connection: what was begun for a caller who went away is still ended properly.
func mustFinish(r *http.Request) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(r.Context()), 10*time.Minute)
}

func (a *API) domain() *string {
	if a.cfg.Domain == "" {
		return nil
	}
	return &a.cfg.Domain
}
