package rest_test

import (
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"torpor/api/agentpb"
	"torpor/api/apierr"
	"torpor/controlplane/rest"
)

func TestLifeOfASandbox(t *testing.T) {
	p := newPlane(t, rest.Config{Domain: "example.test:8443"})
	created := p.call("POST", "/v2/sandboxes", `{"templateID":"base","metadata":{"k":"v","user_id":"u1"},"envVars":{"A":"b"}}`)
	p.want(created, 201, map[string]any{
		"templateID": "base", "clientID": "torpor", "envdVersion": "0.6.13", "domain": "example.test:8443", "alias": "base",
	})
	id, token := created.body["sandboxID"].(string), created.body["envdAccessToken"].(string)
	if len(token) != 64 {
		t.Errorf("token %q", token)
	}

	got := p.call("GET", "/sandboxes/"+id, "")
	p.want(got, 200, map[string]any{
		"sandboxID": id, "templateID": "base", "clientID": "torpor", "envdVersion": "0.6.13", "state": "running",
		"cpuCount": 2.0, "memoryMB": 512.0, "diskSizeMB": 4096.0, "envdAccessToken": token, "domain": "example.test:8443",
		"allowInternetAccess": false,
	})
	life := got.body["lifecycle"].(map[string]any)
	if got.body["metadata"].(map[string]any)["k"] != "v" || life["onTimeout"] != "kill" || life["autoResume"] != false {
		t.Error(got.raw)
	}
	started, ended := at(t, got, "startedAt"), at(t, got, "endAt")
	if d := ended.Sub(started); d != 300*time.Second {
		t.Errorf("default timeout %v", d)
	}

	p.want(p.call("POST", "/sandboxes/"+id+"/pause", ""), 204, nil)
	p.want(p.call("GET", "/sandboxes/"+id, ""), 200, map[string]any{"state": "paused", "envdAccessToken": token})
	p.want(p.call("POST", "/sandboxes/"+id+"/pause", `{"memory":true}`), 409, map[string]any{"code": 409.0, "error": "already_paused"})
	p.want(p.call("POST", "/sandboxes/"+id+"/timeout", `{"timeout":10}`), 404, map[string]any{"code": 404.0})
	p.want(p.call("POST", "/v2/sandboxes/"+id+"/connect", `{}`), 201, map[string]any{"sandboxID": id, "envdAccessToken": token})
	p.want(p.call("POST", "/v2/sandboxes/"+id+"/connect", ""), 200, map[string]any{"sandboxID": id})
	p.want(p.call("POST", "/sandboxes/"+id+"/connect", `{"timeout":1}`), 200, map[string]any{"sandboxID": id})
	p.want(p.call("POST", "/sandboxes/"+id+"/resume", ""), 409, map[string]any{"error": "already_running"})
	p.call("POST", "/sandboxes/"+id+"/pause", `{}`)
	p.want(p.call("POST", "/sandboxes/"+id+"/resume", `{"timeout":5}`), 201, map[string]any{"sandboxID": id})

	p.want(p.call("DELETE", "/sandboxes/"+id, ""), 204, nil)
	p.want(p.call("DELETE", "/sandboxes/"+id, ""), 404, map[string]any{"code": 404.0})
	p.want(p.call("GET", "/sandboxes/"+id, ""), 404, map[string]any{"code": 404.0, "error": "not_found"})
	if list := p.call("GET", "/v2/sandboxes", ""); list.raw != "[]" {
		t.Errorf("list after kill: %s", list.raw)
	}
	if events := p.call("GET", "/v1/sandboxes/"+id+"/events", ""); events.status != 200 || !strings.Contains(events.raw, "created") {
		t.Errorf("events after the end: %d %s", events.status, events.raw)
	}
}

func at(t *testing.T, a answer, field string) time.Time {
	t.Helper()
	s, _ := a.body[field].(string)
	v, err := time.Parse(time.RFC3339Nano, s)
	if err != nil || !strings.HasSuffix(s, "Z") {
		t.Fatalf("%s: %q is no UTC time", field, s)
	}
	return v
}

func TestCreateSaysToTheAgentWhatWasAsked(t *testing.T) {
	p := newPlane(t, rest.Config{})
	for _, c := range []struct {
		path, body string
		timeout    int64
		onTimeout  string
		autoResume bool
		secured    bool
	}{
		{"/sandboxes", `{"templateID":"base"}`, 15, "kill", false, true},
		{"/sandboxes", `{"templateID":"base","timeout":300,"secure":true,"allow_internet_access":true,"autoPause":false}`, 300, "kill", false, true},
		{"/sandboxes", `{"templateID":"base","secure":false,"allow_internet_access":false}`, 15, "kill", false, false},
		{"/v2/sandboxes", `{"templateID":"base"}`, 300, "kill", false, true},
		{"/v2/sandboxes", `{"templateID":"base","timeout":7,"autoPause":true,"autoPauseMemory":true,"autoResume":{"enabled":true}}`, 7, "pause", true, true},
		{"/v2/sandboxes", `{"templateID":"base","network":{"allowPublicTraffic":true,"allowOut":[]},"mcp":null,"volumeMounts":[]}`, 300, "kill", false, true},
	} {
		a := p.call("POST", c.path, c.body)
		p.want(a, 201, nil)
		id := a.body["sandboxID"].(string)
		sb, err := p.node.State(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		_, secured := a.body["envdAccessToken"]
		if sb.TimeoutSeconds != c.timeout || sb.Lifecycle.OnTimeout != c.onTimeout || sb.Lifecycle.AutoResume != c.autoResume || secured != c.secured {
			t.Errorf("%s %s: %v secured=%v", c.path, c.body, sb, secured)
		}
		if _, ok := a.body["domain"]; ok {
			t.Error("a domain nobody configured")
		}
	}
}

func TestFailedCreateLeavesNothing(t *testing.T) {
	p := newPlane(t, rest.Config{})
	p.agent.Fail("Create", apierr.New(apierr.NoCapacity, "no memory left"))
	a := p.call("POST", "/v2/sandboxes", `{"templateID":"base"}`)
	p.want(a, 503, map[string]any{"error": "no_capacity", "retryable": true})
	if a.header.Get("Retry-After") == "" || !strings.Contains(a.body["message"].(string), "service unavailable") {
		t.Errorf("%v %s", a.header, a.raw)
	}
	calls := p.agent.Changes()
	if len(calls) != 2 || !strings.HasPrefix(calls[1], "Kill ") {
		t.Errorf("%v", calls)
	}
	if gone, err := p.store.Deleted(t.Context(), strings.TrimPrefix(calls[1], "Kill ")); !gone || err != nil {
		t.Error("the row is left", err)
	}
}

func TestAnswersAreNeverSentForASandboxThatIsNotReady(t *testing.T) {
	p := newPlane(t, rest.Config{})
	id := p.create(`{"templateID":"base"}`)
	p.agent.Set(id, func(sb *agentpb.Sandbox) { sb.Envd.State = agentpb.EnvdState_ENVD_STATE_UNRESPONSIVE })
	p.want(p.call("GET", "/sandboxes/"+id, ""), 200, map[string]any{"state": "paused"})
	p.want(p.call("POST", "/v2/sandboxes/"+id+"/connect", ""), 503, map[string]any{"error": "not_ready", "vm": "running", "envd": "unresponsive", "sandboxID": id})
	p.agent.Set(id, func(sb *agentpb.Sandbox) { sb.Envd.State = agentpb.EnvdState_ENVD_STATE_READY; sb.Incarnation++ })
	p.want(p.call("GET", "/sandboxes/"+id, ""), 200, map[string]any{"state": "paused"}) // envd answered an earlier incarnation
}

func TestDeadlines(t *testing.T) {
	p := newPlane(t, rest.Config{})
	id := p.create(`{"templateID":"base","timeout":600}`)
	end := func() time.Time { return at(t, p.call("GET", "/sandboxes/"+id, ""), "endAt") }
	first := end()
	p.call("POST", "/v2/sandboxes/"+id+"/connect", `{"timeout":30}`)
	p.call("POST", "/sandboxes/"+id+"/refreshes", `{"duration":10}`)
	p.call("GET", "/v2/sandboxes", "")
	if got := end(); !got.Equal(first) {
		t.Errorf("a shorter connect, refresh, get or list moved the deadline: %v -> %v", first, got)
	}
	p.want(p.call("POST", "/sandboxes/"+id+"/refreshes", `{"duration":3600}`), 204, nil)
	if got := end(); !got.After(first) {
		t.Error("refresh did not extend")
	}
	p.want(p.call("POST", "/sandboxes/"+id+"/timeout", `{"timeout":100}`), 204, nil)
	if got := end(); !got.Before(first) {
		t.Error("set-timeout did not shorten")
	}
	p.want(p.call("POST", "/sandboxes/"+id+"/timeout", `{"timeout":-5}`), 204, nil)
	if got := end(); got.After(time.Now()) {
		t.Errorf("a negative timeout counts as 0: %v", got)
	}
	for state, want := range map[agentpb.VMState]int{
		agentpb.VMState_VM_STATE_PAUSING: 409, agentpb.VMState_VM_STATE_RESUMING: 409, agentpb.VMState_VM_STATE_PAUSED: 404,
		agentpb.VMState_VM_STATE_STOPPED: 404, agentpb.VMState_VM_STATE_STOPPING: 404,
	} {
		p.agent.Set(id, func(sb *agentpb.Sandbox) { sb.Vm.State = state })
		p.want(p.call("POST", "/sandboxes/"+id+"/timeout", `{"timeout":10}`), want, map[string]any{"code": float64(want)})
	}
}

func TestDeleteInEveryState(t *testing.T) {
	p := newPlane(t, rest.Config{})
	for name, n := range agentpb.VMState_value {
		if n == 0 {
			continue
		}
		id := p.create(`{"templateID":"base"}`)
		p.agent.Set(id, func(sb *agentpb.Sandbox) { sb.Vm.State = agentpb.VMState(n) })
		if a := p.call("DELETE", "/sandboxes/"+id, ""); a.status != 204 || a.raw != "" {
			t.Errorf("%s: %d %s", name, a.status, a.raw)
		}
	}
	id := p.create(`{"templateID":"base"}`)
	p.agent.Forget(id) // its deadline came
	p.want(p.call("DELETE", "/sandboxes/"+id, ""), 404, nil)
}

func TestEmptyAnswersAreEmpty(t *testing.T) {
	p := newPlane(t, rest.Config{})
	id := p.create(`{"templateID":"base"}`)
	a := p.call("POST", "/sandboxes/"+id+"/pause", "{}")
	if a.status != 204 || a.raw != "" || a.header.Get("Content-Type") != "" || a.header.Get("Transfer-Encoding") != "" {
		t.Errorf("%d %q %v", a.status, a.raw, a.header)
	}
}

func TestAgentAway(t *testing.T) {
	p := newPlane(t, rest.Config{})
	id := p.create(`{"templateID":"base"}`)
	before := p.call("GET", "/v1/sandboxes/"+id+"/state", "")
	p.agent.Stop()
	for _, c := range [][2]string{
		{"GET", "/sandboxes/" + id},
		{"GET", "/v2/sandboxes"},
		{"POST", "/v2/sandboxes/" + id + "/connect"},
		{"POST", "/sandboxes/" + id + "/pause"},
		{"DELETE", "/sandboxes/" + id},
	} {
		a := p.call(c[0], c[1], "")
		p.want(a, 503, map[string]any{"code": 503.0, "error": "node_unreachable", "retryable": true})
		if a.header.Get("Retry-After") == "" {
			t.Errorf("%v: no Retry-After", c)
		}
	}
	// What was known last is still told, as such.
	last := p.call("GET", "/v1/sandboxes/"+id+"/state", "")
	p.want(last, 200, map[string]any{"nodeReachable": false, "public": "paused", "incarnation": before.body["incarnation"]})
	nodes := p.call("GET", "/v1/nodes", "")
	if !strings.Contains(nodes.raw, `"reachable":false`) {
		t.Error(nodes.raw)
	}
	if err := p.agent.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.want(p.call("GET", "/sandboxes/"+id, ""), 200, map[string]any{"state": "running"})
}

func TestPreflightAndCORS(t *testing.T) {
	p := newPlane(t, rest.Config{})
	a := p.call("GET", "/v2/sandboxes", "")
	if a.header.Get("Access-Control-Allow-Origin") != "*" || !strings.Contains(a.header.Get("Access-Control-Expose-Headers"), "X-Next-Token") {
		t.Errorf("%v", a.header)
	}
	if a := p.send("GET", "/v2/sandboxes", "", nil); a.status != 401 || a.header.Get("Access-Control-Allow-Origin") != "*" {
		t.Errorf("a 401 a script cannot read: %d %v", a.status, a.header)
	}
}

func TestRoutes(t *testing.T) {
	p := newPlane(t, rest.Config{})
	p.want(p.send("GET", "/v1/health", "", nil), 200, map[string]any{"status": "ok", "version": "test"})
	p.want(p.call("GET", "/nothing/here", ""), 404, map[string]any{"code": 404.0, "error": "not_found"})
	p.want(p.call("GET", "/v2/sandboxes/", ""), 404, map[string]any{"code": 404.0})
	p.want(p.call("GET", "//sandboxes", ""), 404, map[string]any{"code": 404.0})
	a := p.call("PUT", "/v2/sandboxes", "{}")
	p.want(a, 405, map[string]any{"code": 405.0})
	if a.header.Get("Allow") != "POST, GET" {
		t.Errorf("Allow: %q", a.header.Get("Allow"))
	}
	if a := p.call("HEAD", "/v1/health", ""); a.status != http.StatusOK {
		t.Errorf("HEAD: %d", a.status)
	}
	for _, c := range []string{
		"PUT /sandboxes/i1/network", "GET /sandboxes/i1/metrics", "POST /v3/templates", "GET /templates/aliases/ns%2Fal",
		"DELETE /templates/base",
	} {
		method, path, _ := strings.Cut(c, " ")
		a := p.call(method, path, "")
		p.want(a, 501, map[string]any{"code": 501.0, "error": "not_implemented"})
	}
	if !slices.Equal(p.agent.Changes(), nil) {
		t.Errorf("something changed: %v", p.agent.Changes())
	}
}
