package rest_test

import (
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"torpor/api/agentpb"
	"torpor/controlplane/fakeagent"
	"torpor/controlplane/rest"
	"torpor/controlplane/store"
)

// ids lists the ids of an answer.
func ids(t *testing.T, a answer) []string {
	t.Helper()
	var list []struct {
		SandboxID string `json:"sandboxID"`
	}
	if err := json.Unmarshal([]byte(a.raw), &list); a.status != 200 || err != nil {
		t.Fatalf("%d %s: %v", a.status, a.raw, err)
	}
	found := []string{}
	for _, e := range list {
		found = append(found, e.SandboxID)
	}
	return found
}

// put makes a sandbox that started at a given second.
func (p *plane) put(id string, second int64, metadata map[string]string) {
	p.t.Helper()
	if err := p.store.Insert(p.t.Context(), store.Sandbox{ID: id, TemplateID: "base", Metadata: metadata, AccessToken: "tok" + id, NodeID: "node1", CreatedAt: time.Unix(second, 0)}); err != nil {
		p.t.Fatal(err)
	}
	sb := fakeagent.Ready(id, time.Minute)
	sb.StartedAt = second * 1000
	p.agent.Add(sb)
}

func TestListPages(t *testing.T) {
	p := newPlane(t, rest.Config{})
	var all []string
	for i := range 7 {
		id := fmt.Sprintf("i%d", i)
		all = append(all, id)
		p.put(id, int64(1000+i/2), nil) // pairs share a start
	}
	p.agent.Add(fakeagent.Ready("istranger", time.Minute)) // the control plane has no row of it
	newest := []string{"i6", "i4", "i5", "i2", "i3", "i0", "i1"}
	for order, want := range map[string][]string{"": newest, "&order=desc": newest, "&order=asc": all} {
		for limit := 1; limit <= 8; limit++ {
			var got []string
			token, pages := "", 0
			for {
				a := p.call("GET", fmt.Sprintf("/v2/sandboxes?limit=%d%s&nextToken=%s", limit, order, token), "")
				got = append(got, ids(t, a)...)
				if a.header.Get("X-Total-Running") != "7" {
					t.Errorf("X-Total-Running %q", a.header.Get("X-Total-Running"))
				}
				pages++
				if token = a.header.Get("X-Next-Token"); token == "" || pages > 10 {
					break
				}
			}
			if !slices.Equal(got, want) || pages != (7+limit-1)/limit {
				t.Errorf("order %q, limit %d: %v in %d pages", order, limit, got, pages)
			}
		}
	}
	asc := p.call("GET", "/v2/sandboxes?limit=1&order=asc", "").header.Get("X-Next-Token")
	p.want(p.call("GET", "/v2/sandboxes?order=desc&nextToken="+asc, ""), 400, map[string]any{"code": 400.0})
	p.agent.Forget("i0") // the cursor's own element ends: the next page begins where it was
	if got := ids(t, p.call("GET", "/v2/sandboxes?nextToken="+asc, "")); !slices.Equal(got, all[1:]) {
		t.Errorf("%v", got)
	}
}

func TestListFilters(t *testing.T) {
	p := newPlane(t, rest.Config{})
	p.put("i1", 1000, map[string]string{"a b": "c&d=é", "k": "v"})
	p.put("i2", 2000, map[string]string{"k": "v"})
	p.put("i3", 3000, map[string]string{"k": "w"})
	p.agent.Set("i2", func(sb *agentpb.Sandbox) { sb.Vm.State = agentpb.VMState_VM_STATE_PAUSED })
	p.agent.Set("i3", func(sb *agentpb.Sandbox) { sb.Envd.State = agentpb.EnvdState_ENVD_STATE_STARTING })
	for query, want := range map[string]string{
		"": "i3 i2 i1",
		"metadata=a%252520b%3Dc%252526d%25253D%2525C3%2525A9": "i1", // as both SDKs encode it (e2b-wire B.5)
		"metadata=k%3Dv": "i2 i1",
		"metadata=k%3Dv%26a%252520b%3Dc%252526d%25253D%2525C3%2525A9": "i1",
		"metadata=k%3Dnone":                        "",
		"metadata=other%3Dv":                       "",
		"state=running":                            "i1",
		"state=paused":                             "i3 i2",
		"state=running,paused":                     "i3 i2 i1",
		"state=running&state=paused":               "i3 i2 i1",
		"startedAfter=1970-01-01T00:33:20Z":        "i3 i2",
		"startedAfter=1970-01-01T00:33:20.001Z":    "i3",
		"startedAfter=1970-01-01T01:33:20%2B01:00": "i3 i2",
		"template=base":                            "i3 i2 i1",
		"template=unknown":                         "",
		"template=ns/base":                         "",
	} {
		a := p.call("GET", "/v2/sandboxes?"+query, "")
		if got := strings.Join(ids(t, a), " "); got != want {
			t.Errorf("%q: %q, want %q", query, got, want)
		}
		if want == "" && a.raw != "[]" {
			t.Errorf("%q: %s", query, a.raw)
		}
	}
	if a := p.call("GET", "/v2/sandboxes?state=paused", ""); a.header.Get("X-Total-Running") != "" {
		t.Error("X-Total-Running without running ones asked for")
	}
	if got := ids(t, p.call("GET", "/sandboxes", "")); !slices.Equal(got, []string{"i1"}) {
		t.Errorf("v1 lists the running ones: %v", got)
	}
	if got := ids(t, p.call("GET", "/sandboxes?metadata=k%3Dw", "")); len(got) != 0 {
		t.Errorf("%v", got)
	}
}

func TestListedFields(t *testing.T) {
	p := newPlane(t, rest.Config{})
	p.put("i1", 1000, nil)
	var list []map[string]any
	if err := json.Unmarshal([]byte(p.call("GET", "/v2/sandboxes", "").raw), &list); err != nil {
		t.Fatal(err)
	}
	for _, field := range []string{"templateID", "sandboxID", "clientID", "startedAt", "endAt", "cpuCount", "memoryMB", "diskSizeMB", "state", "envdVersion"} {
		if list[0][field] == nil {
			t.Errorf("Python needs %s: %v", field, list[0])
		}
	}
	if list[0]["startedAt"] != "1970-01-01T00:16:40Z" {
		t.Errorf("startedAt %v", list[0]["startedAt"])
	}
}

func TestStatesArePaged(t *testing.T) {
	p := newPlane(t, rest.Config{})
	for i := range 3 {
		p.put(fmt.Sprintf("i%d", i), int64(i), nil)
	}
	first := p.call("GET", "/v1/sandboxes?limit=2", "")
	p.want(first, 200, map[string]any{"next": "i1"})
	second := p.call("GET", "/v1/sandboxes?limit=2&after="+url.QueryEscape("i1"), "")
	p.want(second, 200, map[string]any{"next": nil})
	if n, m := len(first.body["sandboxes"].([]any)), len(second.body["sandboxes"].([]any)); n != 2 || m != 1 {
		t.Errorf("%d + %d", n, m)
	}
	if a := p.call("GET", "/v1/sandboxes?after=z", ""); !strings.Contains(a.raw, `"sandboxes":[]`) {
		t.Error(a.raw)
	}
}
