package rest

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"time"

	"torpor/api/agentpb"
	"torpor/api/apierr"
	"torpor/api/e2b"
	"torpor/api/id"
	"torpor/controlplane/reply"
	"torpor/controlplane/store"
)

// Timeouts of requests that name none, in seconds (e2b-wire B.3, B.4).
const (
	defaultTimeoutV1 = 15
	defaultTimeoutV2 = 300
)

// create serves both generations: they differ in the default timeout only. Every sandbox is secured unless a v1 client
// says secure:false.
func (a *API) create(w http.ResponseWriter, r *http.Request) error {
	v2 := strings.HasPrefix(r.URL.Path, "/v2/")
	req, err := a.createRequest(r, v2)
	if err != nil {
		return err
	}
	from, err := a.origin(r.Context(), req.TemplateID)
	if err != nil {
		return err
	}
	node, err := a.node.Describe(r.Context())
	if err != nil {
		return err
	}
	row := store.Sandbox{
		ID: id.NewSandbox(), TemplateID: from.templateID, Metadata: req.Metadata, UserID: req.Metadata["user_id"],
		NodeID: node.NodeId, CreatedAt: time.Now(),
	}
	if req.Secure == nil || *req.Secure {
		row.AccessToken = id.NewToken()
	}
	ctx, cancel := mustFinish(r)
	defer cancel()
	if err := a.store.Insert(ctx, row); err != nil { // before the VM exists: a crash leaves nothing unknown
		return err
	}
	sb, err := a.start(ctx, row, from.snapshotID, req)
	if err != nil {
		return err
	}
	reply.JSON(w, http.StatusCreated, a.sandbox(row, sb))
	return nil
}

// start has the node make the sandbox of a row, and takes everything back if it cannot.
func (a *API) start(ctx context.Context, row store.Sandbox, snapshotID string, req *e2b.NewSandbox) (*agentpb.Sandbox, error) {
	onTimeout := "kill"
	if req.AutoPause != nil && *req.AutoPause {
		onTimeout = "pause"
	}
	sb, err := a.node.Create(ctx, &agentpb.CreateRequest{
		SandboxId: row.ID, TemplateId: row.TemplateID, SnapshotId: snapshotID, AccessToken: row.AccessToken, EnvVars: req.EnvVars,
		TimeoutSeconds: *req.Timeout,
		Lifecycle:      &agentpb.Lifecycle{OnTimeout: onTimeout, AutoResume: req.AutoResume != nil && *req.AutoResume.Enabled},
	})
	if err == nil {
		err = requireReady(sb)
	}
	if err == nil {
		return sb, nil
	}
	a.takeBack(ctx, row.ID)
	return nil, err
}

// takeBack leaves nothing of a sandbox that could not be made. What it cannot end now the sweep does.
func (a *API) takeBack(ctx context.Context, sandboxID string) {
	if _, err := a.store.MarkDeleted(ctx, sandboxID, time.Now()); err != nil {
		a.log.Error().Str("sandbox", sandboxID).Err(err).Msg("row of a failed create left behind")
	}
	if err := a.node.Kill(ctx, sandboxID); err != nil && !errors.Is(err, &apierr.Error{Code: apierr.NotFound}) {
		a.log.Warn().Str("sandbox", sandboxID).Err(err).Msg("failed create not cleaned up yet")
	}
}

// createRequest reads and checks the body, and fills in the default timeout.
func (a *API) createRequest(r *http.Request, v2 bool) (*e2b.NewSandbox, error) {
	var req e2b.NewSandbox
	if err := decode(r, &req); err != nil {
		return nil, err
	}
	if req.TemplateID == "" {
		return nil, apierr.New(apierr.BadRequest, "field \"templateID\" is required")
	}
	fallback := int64(defaultTimeoutV1)
	if v2 {
		fallback = defaultTimeoutV2
	}
	if req.Timeout == nil {
		req.Timeout = &fallback
	}
	if err := a.checkTimeout(*req.Timeout); err != nil {
		return nil, err
	}
	if err := refuseUnsupported(&req, v2); err != nil {
		return nil, err
	}
	if req.Metadata == nil {
		req.Metadata = map[string]string{}
	}
	return &req, checkEnv(req.EnvVars)
}

// checkTimeout wants more than 0 and at most the maximum, in seconds.
func (a *API) checkTimeout(seconds int64) error {
	if seconds <= 0 {
		return apierr.New(apierr.BadRequest, "Timeout must be greater than 0")
	}
	return a.checkMaximum(seconds)
}

func (a *API) checkMaximum(seconds int64) error {
	if most := int64(a.cfg.MaxTimeout / time.Second); seconds > most {
		return apierr.New(apierr.BadRequest, "Timeout cannot be greater than %d seconds", most)
	}
	return nil
}

// refuseUnsupported names the options this version does not have. Values that mean what we do anyway are accepted, since
// SDKs send them unasked; allow_internet_access:true is among them although sandboxes have no network yet.
func refuseUnsupported(req *e2b.NewSandbox, v2 bool) error {
	set := func(raw json.RawMessage) bool { return len(raw) > 0 && string(raw) != "null" }
	switch {
	case v2 && req.Secure != nil && !*req.Secure:
		return unsupported("secure:false", "every sandbox of /v2 is secured")
	case req.AutoResume != nil && req.AutoResume.Enabled == nil:
		return apierr.New(apierr.BadRequest, "field \"autoResume.enabled\" is required")
	case req.AutoPauseMemory != nil && !*req.AutoPauseMemory:
		return unsupported("autoPauseMemory:false", "a pause always keeps the memory")
	case set(req.MCP):
		return unsupported("mcp", "leave it out")
	case set(req.IAM):
		return unsupported("iam", "leave it out")
	case len(req.VolumeMounts) > 0:
		return unsupported("volumeMounts", "leave it out")
	}
	n := req.Network
	switch {
	case n == nil:
	case n.AllowPublicTraffic != nil && !*n.AllowPublicTraffic:
		return unsupported("network.allowPublicTraffic:false", "leave it out")
	case len(n.AllowOut) > 0:
		return unsupported("network.allowOut", "sandboxes have no network yet")
	case len(n.DenyOut) > 0:
		return unsupported("network.denyOut", "sandboxes have no network yet")
	case set(n.EgressProxy):
		return unsupported("network.egressProxy", "sandboxes have no network yet")
	case n.MaskRequestHost != nil:
		return unsupported("network.maskRequestHost", "leave it out")
	case set(n.Rules):
		return unsupported("network.rules", "sandboxes have no network yet")
	case len(n.HTTPSPorts) > 0:
		return unsupported("network.httpsPorts", "leave it out")
	}
	return nil
}

func unsupported(option, why string) error {
	return apierr.New(apierr.Unsupported, "option %q is not supported: %s", option, why)
}

// checkEnv refuses names and values no process environment can hold.
func checkEnv(env map[string]string) error {
	for name, value := range env {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.Contains(value, "\x00") {
			return apierr.New(apierr.BadRequest, "field \"envVars\" holds %q, which cannot be an environment variable", name)
		}
	}
	return nil
}

// sandbox is the answer of create, connect and resume.
func (a *API) sandbox(row store.Sandbox, sb *agentpb.Sandbox) e2b.Sandbox {
	return e2b.Sandbox{
		SandboxID: row.ID, TemplateID: row.TemplateID, ClientID: e2b.ClientID, Alias: row.TemplateID,
		EnvdVersion: sb.GetEnvd().GetVersion(), EnvdAccessToken: row.AccessToken, Domain: a.domain(),
	}
}
