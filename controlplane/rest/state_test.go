package rest_test

import (
	"bufio"
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"torpor/api/agentpb"
	"torpor/controlplane/rest"
)

func TestStateTellsBothTruths(t *testing.T) {
	p := newPlane(t, rest.Config{})
	id := p.create(`{"templateID":"base","metadata":{"user_id":"u1"},"autoPause":true,"autoResume":{"enabled":true}}`)
	p.agent.Set(id, func(sb *agentpb.Sandbox) {
		sb.Incarnation, sb.StartedAt, sb.EndAt = 7, 1000, 301000
		sb.Vm = &agentpb.VM{State: agentpb.VMState_VM_STATE_RUNNING, Since: 1000, Reason: "woken by a request"}
		sb.Envd = &agentpb.Envd{State: agentpb.EnvdState_ENVD_STATE_UNRESPONSIVE, Since: 2000, Version: "0.6.13", Incarnation: 7, LastOk: 1500, LatencyMs: 1.5, Error: "probe: timeout"}
		sb.SnapshotBytes, sb.ResumeMode = 5, agentpb.ResumeMode_RESUME_MODE_PREVIOUS
	})
	a := p.call("GET", "/v1/sandboxes/"+id+"/state", "")
	observed := a.body["observedAt"]
	delete(a.body, "observedAt")
	got, _ := json.Marshal(a.body)
	want := `{"disk":{"layerBytes":1048576},"endAt":"1970-01-01T00:05:01Z",` +
		`"envd":{"error":"probe: timeout","incarnation":7,"lastOK":"1970-01-01T00:00:01.5Z","latencyMs":1.5,"since":"1970-01-01T00:00:02Z","state":"unresponsive","version":"0.6.13"},` +
		`"idleSince":null,"incarnation":7,"lifecycle":{"autoResume":true,"onTimeout":"pause"},` +
		`"memory":{"guestBytes":536870912,"residentBytes":94371840,"snapshotBytes":5},"nodeID":"node1","nodeReachable":true,` +
		`"public":"paused","resumeMode":"memory-previous","sandboxID":"` + id + `","startedAt":"1970-01-01T00:00:01Z","templateID":"base","tier":"live","userID":"u1",` +
		`"vm":{"reason":"woken by a request","since":"1970-01-01T00:00:01Z","state":"running"}}`
	if string(got) != want || observed == nil {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	p.call("POST", "/sandboxes/"+id+"/pause", "")
	p.want(p.call("GET", "/v1/sandboxes/"+id+"/state", ""), 200, map[string]any{"public": "paused", "tier": "disk"})
	p.agent.Set(id, func(sb *agentpb.Sandbox) { sb.Tier = agentpb.Tier_TIER_FROZEN })
	p.want(p.call("GET", "/v1/sandboxes/"+id+"/state", ""), 200, map[string]any{"public": "paused", "tier": "frozen"})
}

// memory:false is carried to the node, by connect and by resume, and the state says what became of it.
func TestMemoryFalseBootsAnew(t *testing.T) {
	p := newPlane(t, rest.Config{})
	for _, path := range []string{"POST /v2/sandboxes/ID/connect", "POST /sandboxes/ID/connect", "POST /sandboxes/ID/resume"} {
		for body, mode := range map[string]string{`{"timeout":60,"memory":false}`: "disk", `{"timeout":60,"memory":true}`: "memory", `{"timeout":60}`: "memory"} {
			id := p.create(`{"templateID":"base"}`)
			p.want(p.call("GET", "/v1/sandboxes/"+id+"/state", ""), 200, map[string]any{"resumeMode": "none"})
			p.call("POST", "/sandboxes/"+id+"/pause", "")
			method, route, _ := strings.Cut(strings.ReplaceAll(path, "ID", id), " ")
			p.want(p.call(method, route, body), 201, map[string]any{"sandboxID": id})
			p.want(p.call("GET", "/v1/sandboxes/"+id+"/state", ""), 200, map[string]any{"resumeMode": mode, "tier": "live"})
		}
	}
}

func TestPublicStateTable(t *testing.T) {
	p := newPlane(t, rest.Config{})
	id := p.create(`{"templateID":"base"}`)
	for vmName, vm := range agentpb.VMState_value {
		for envdName, envd := range agentpb.EnvdState_value {
			for _, incarnation := range []uint64{1, 2} {
				p.agent.Set(id, func(sb *agentpb.Sandbox) {
					sb.Vm.State, sb.Envd.State = agentpb.VMState(vm), agentpb.EnvdState(envd)
					sb.Incarnation, sb.Envd.Incarnation = 2, incarnation
				})
				want := "paused"
				if vmName == "VM_STATE_RUNNING" && envdName == "ENVD_STATE_READY" && incarnation == 2 {
					want = "running"
				}
				a := p.call("GET", "/v1/sandboxes/"+id+"/state", "")
				if a.body["public"] != want {
					t.Errorf("%s, %s, incarnation %d of 2: public is %v", vmName, envdName, incarnation, a.body["public"])
				}
				if vmName == "VM_STATE_STOPPING" {
					continue // on its way out: not found for E2B
				}
				if e2b := p.call("GET", "/sandboxes/"+id, ""); e2b.body["state"] != want {
					t.Errorf("%s, %s: E2B's state is %v", vmName, envdName, e2b.body["state"])
				}
			}
		}
	}
}

// watch opens a watch and returns a func that reads its next line, nil at a clean end.
func (p *plane) watch(id string) func() map[string]any {
	p.t.Helper()
	req, err := http.NewRequestWithContext(p.t.Context(), "GET", p.url+"/v1/sandboxes/"+id+"/state?watch=true", nil)
	if err != nil {
		p.t.Fatal(err)
	}
	req.Header.Set("X-API-KEY", p.key)
	res, err := http.DefaultTransport.RoundTrip(req)
	if err != nil || res.StatusCode != 200 {
		p.t.Fatal(res, err)
	}
	p.t.Cleanup(func() { res.Body.Close() })
	lines := bufio.NewScanner(res.Body)
	return func() map[string]any {
		if !lines.Scan() {
			if lines.Err() != nil {
				p.t.Fatal(lines.Err())
			}
			return nil
		}
		var line map[string]any
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			p.t.Fatal(err)
		}
		return line
	}
}

func TestWatchTellsEveryChangeUntilTheEnd(t *testing.T) {
	p := newPlane(t, rest.Config{})
	id := p.create(`{"templateID":"base"}`)
	next := p.watch(id)
	if first := next(); first["public"] != "running" {
		t.Errorf("%v", first)
	}
	p.call("POST", "/sandboxes/"+id+"/pause", "")
	if line := next(); line["public"] != "paused" || line["vm"].(map[string]any)["state"] != "paused" {
		t.Errorf("%v", line)
	}
	p.agent.Stop()
	if line := next(); line["nodeReachable"] != false {
		t.Errorf("the node went away unsaid: %v", line)
	}
	if err := p.agent.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	if line := next(); line["nodeReachable"] != true {
		t.Errorf("%v", line)
	}
	p.call("DELETE", "/sandboxes/"+id, "")
	if line := next(); line != nil {
		t.Errorf("after the end: %v", line)
	}
}

func TestEventsConsoleNodes(t *testing.T) {
	p := newPlane(t, rest.Config{})
	id := p.create(`{"templateID":"base"}`)
	one := p.call("GET", "/v1/sandboxes/"+id+"/events?limit=1", "")
	p.want(one, 200, map[string]any{"next": 1.0})
	event := one.body["events"].([]any)[0].(map[string]any)
	if event["phasesMs"].(map[string]any)["restore"] != 12.5 || event["to"] != "running" || event["seq"] != 1.0 {
		t.Errorf("%v", event)
	}
	two := p.call("GET", "/v1/sandboxes/"+id+"/events?after=1", "")
	p.want(two, 200, map[string]any{"next": 2.0})
	if !strings.Contains(two.raw, `"phasesMs":{}`) || len(two.body["events"].([]any)) != 1 {
		t.Error(two.raw)
	}
	if a := p.call("GET", "/v1/sandboxes/"+id+"/events?after=2", ""); a.raw != `{"events":[],"next":2}` {
		t.Error(a.raw)
	}
	if a := p.call("GET", "/v1/sandboxes/"+id+"/console", ""); a.raw != "boot\n\xff" || !strings.HasPrefix(a.header.Get("Content-Type"), "text/plain") {
		t.Errorf("%q %v", a.raw, a.header)
	}
	a := p.send("GET", "/v1/sandboxes/"+id+"/console", "", map[string]string{"X-API-KEY": p.key, "Accept": "application/json"})
	p.want(a, 200, map[string]any{"console": "boot\n\uFFFD"})
	if a := p.call("GET", "/v1/nodes", ""); a.raw != `{"nodes":[{"nodeID":"node1","reachable":true,"error":"","version":"test","kvm":"kvm_amd","emulated":true,`+
		`"templates":[{"templateID":"base","digest":"sha256:00","state":"ready","error":"","cpuCount":2,"memoryMB":512,"diskSizeMB":4096,"envdVersion":"0.6.13"}]}],"next":null}` {
		t.Error(a.raw)
	}
}
