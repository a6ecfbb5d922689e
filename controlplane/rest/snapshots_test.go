package rest_test

import (
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"torpor/api/apierr"
	"torpor/controlplane/fleet"
	"torpor/controlplane/rest"
	"torpor/controlplane/store"

	"github.com/rs/zerolog"
)

// keep makes a snapshot and returns its id.
func (p *plane) keep(sandboxID, body string) string {
	p.t.Helper()
	a := p.call("POST", "/sandboxes/"+sandboxID+"/snapshots", body)
	p.want(a, 201, nil)
	return a.body["snapshotID"].(string)
}

// listed returns the ids of GET /snapshots.
func (p *plane) listed(query string) []string {
	p.t.Helper()
	found, _ := p.snapshotPage(query)
	return found
}

func (p *plane) snapshotPage(query string) (ids []string, next string) {
	p.t.Helper()
	a := p.call("GET", "/snapshots?"+query, "")
	var list []struct {
		SnapshotID string   `json:"snapshotID"`
		Names      []string `json:"names"`
	}
	if err := json.Unmarshal([]byte(a.raw), &list); a.status != 200 || err != nil || list == nil {
		p.t.Fatalf("%d %s: %v", a.status, a.raw, err)
	}
	ids = []string{}
	for _, s := range list {
		if s.Names == nil {
			p.t.Error("names is null")
		}
		ids = append(ids, s.SnapshotID)
	}
	return ids, a.header.Get("X-Next-Token")
}

func TestSnapshotsComeAndGo(t *testing.T) {
	p := newPlane(t, rest.Config{})
	one, two := p.create(`{"templateID":"base"}`), p.create(`{"templateID":"base"}`)
	if got := p.listed(""); len(got) != 0 {
		t.Errorf("listed %v", got)
	}
	plain := p.keep(one, ``)
	a := p.call("POST", "/sandboxes/"+two+"/snapshots", `{"name":"My-Snap:v1"}`)
	p.want(a, 201, nil)
	named := a.body["snapshotID"].(string)
	if fmt.Sprint(a.body["names"]) != "[my-snap:v1]" {
		t.Errorf("names %v", a.body["names"])
	}
	for query, want := range map[string][]string{
		"":                              {named, plain},
		"sandboxID=" + one:              {plain},
		"sandboxID=nobody":              {},
		"name=my-snap":                  {named},
		"name=my-snap%3Av1":             {named},
		"name=my-snap%3Adefault":        {},
		"name=" + plain:                 {plain},
		"name=team%2Fmy-snap":           {},
		"name=unknown":                  {},
		"name=my-snap&sandboxID=" + one: {},
	} {
		got := p.listed(query)
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%q: %v, want %v", query, got, want)
		}
	}
	// A sandbox made from one carries its id; it is made from that very snapshot.
	for _, ref := range []string{named, "my-snap:v1"} {
		a := p.call("POST", "/v2/sandboxes", `{"templateID":"`+ref+`"}`)
		p.want(a, 201, map[string]any{"templateID": named})
	}
	p.want(p.call("POST", "/v2/sandboxes", `{"templateID":"my-snap"}`), 404, map[string]any{"message": `template "my-snap" not found`})

	p.want(p.call("DELETE", "/templates/"+url.PathEscape("my-snap:v1"), ""), 204, nil)
	p.want(p.call("DELETE", "/templates/"+named, ""), 404, map[string]any{"code": 404.0, "error": "not_found"})
	p.want(p.call("DELETE", "/sandboxes/"+one, ""), 204, nil)
	if got := p.listed(""); !slices.Equal(got, []string{plain}) {
		t.Errorf("after the end of its sandbox: %v", got)
	}
	if got := p.agent.Snapshots(); !slices.Equal(got, []string{plain}) {
		t.Errorf("the agent has %v", got)
	}
	p.agent.DropSnapshot(plain)
	if got := p.listed(""); len(got) != 0 {
		t.Errorf("one its node does not have is listed: %v", got)
	}
}

// A name with its tag means the newest snapshot that was given it; the one before keeps its id.
func TestANameMovesToTheNewest(t *testing.T) {
	p := newPlane(t, rest.Config{})
	id := p.create(`{"templateID":"base"}`)
	first := p.keep(id, `{"name":"nightly"}`)
	second := p.keep(id, `{"name":"nightly"}`)
	other := p.keep(id, `{"name":"nightly:other"}`)
	p.want(p.call("POST", "/v2/sandboxes", `{"templateID":"nightly"}`), 201, map[string]any{"templateID": second})
	p.want(p.call("POST", "/v2/sandboxes", `{"templateID":"`+first+`"}`), 201, map[string]any{"templateID": first})
	got := p.listed("name=nightly")
	slices.Sort(got)
	want := []string{second, other}
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	// One that fails does not take the name.
	p.agent.Fail("SnapshotCreate", apierr.New(apierr.DiskFull, "full"))
	p.want(p.call("POST", "/sandboxes/"+id+"/snapshots", `{"name":"nightly"}`), 503, map[string]any{"error": "disk_full"})
	p.agent.Fail("SnapshotCreate", nil)
	p.want(p.call("POST", "/v2/sandboxes", `{"templateID":"nightly"}`), 201, map[string]any{"templateID": second})
	if got := p.listed(""); len(got) != 3 {
		t.Errorf("listed %v", got)
	}
}

func TestSnapshotPages(t *testing.T) {
	p := newPlane(t, rest.Config{})
	id := p.create(`{"templateID":"base"}`)
	all := map[string]bool{}
	for range 7 {
		all[p.keep(id, ``)] = true // several within one millisecond, most likely
	}
	whole := p.listed("")
	for limit := 1; limit <= 8; limit++ {
		var got []string
		for token := ""; ; {
			page, next := p.snapshotPage(fmt.Sprintf("limit=%d&nextToken=%s", limit, token))
			got = append(got, page...)
			if len(page) > limit || len(got) > 7 {
				t.Fatalf("limit %d: %d on a page, %d in all", limit, len(page), len(got))
			}
			if token = next; token == "" {
				break
			}
		}
		if !slices.Equal(got, whole) || len(got) != len(all) {
			t.Errorf("limit %d: %v, want %v", limit, got, whole)
		}
	}
	// The same in /v1, by id.
	var got []string
	for after := ""; ; {
		a := p.call("GET", "/v1/sandboxes/"+id+"/snapshots?limit=3&after="+after, "")
		p.want(a, 200, nil)
		for _, s := range a.body["snapshots"].([]any) {
			one := s.(map[string]any)
			if one["sandboxID"] != id || one["sizeBytes"] != float64(3<<20) || one["cpuCount"] != 2.0 {
				t.Errorf("%v", one)
			}
			got = append(got, one["snapshotID"].(string))
		}
		next, more := a.body["next"].(string)
		if !more {
			break
		}
		after = next
	}
	if !slices.Equal(got, whole) {
		t.Errorf("/v1: %v, want %v", got, whole)
	}
}

func TestFork(t *testing.T) {
	p := newPlane(t, rest.Config{})
	id := p.create(`{"templateID":"base","metadata":{"user_id":"u","k":"v"},"autoPause":true}`)
	parent, err := p.store.Get(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	p.agent.FailChildren = map[int]error{1: apierr.New(apierr.NotReady, "no room"), 2: apierr.New(apierr.NotFound, "vanished")}
	a := p.call("POST", "/sandboxes/"+id+"/fork", `{"count":4,"timeout":60}`)
	if a.status != 201 {
		t.Fatalf("%d %s", a.status, a.raw)
	}
	var results []struct {
		Sandbox *struct{ SandboxID, TemplateID, ClientID, EnvdVersion, EnvdAccessToken string }
		Error   *apierr.Body
	}
	if err := json.Unmarshal([]byte(a.raw), &results); err != nil || len(results) != 4 {
		t.Fatalf("%s: %v", a.raw, err)
	}
	seen := map[string]bool{id: true, parent.AccessToken: true}
	for i, r := range results {
		if fails := i == 1 || i == 2; fails != (r.Error != nil) || fails == (r.Sandbox != nil) {
			t.Errorf("fork %d: %+v", i, r)
			continue
		}
		if r.Error != nil {
			if want := map[int]int{1: 503, 2: 404}[i]; r.Error.Code != want || r.Error.Message == "" {
				t.Errorf("fork %d: %+v", i, r.Error)
			}
			continue
		}
		sb := r.Sandbox
		if seen[sb.SandboxID] || seen[sb.EnvdAccessToken] || sb.EnvdAccessToken == "" || sb.TemplateID != "base" || sb.ClientID == "" || sb.EnvdVersion == "" {
			t.Errorf("fork %d: %+v", i, sb)
		}
		seen[sb.SandboxID], seen[sb.EnvdAccessToken] = true, true
		detail := p.call("GET", "/sandboxes/"+sb.SandboxID, "")
		p.want(detail, 200, map[string]any{"state": "running"})
		if got := fmt.Sprint(detail.body["metadata"]); got != "map[k:v]" {
			t.Errorf("metadata %s", got)
		}
		if row, err := p.store.Get(t.Context(), sb.SandboxID); err != nil || row.UserID != "" {
			t.Errorf("%+v, %v", row, err)
		}
		if got := fmt.Sprint(detail.body["lifecycle"]); !strings.Contains(got, "pause") {
			t.Errorf("lifecycle %s", got)
		}
	}
	if got := ids(t, p.call("GET", "/v2/sandboxes", "")); len(got) != 3 {
		t.Errorf("%d sandboxes are there: %v", len(got), got)
	}
	p.want(p.call("GET", "/sandboxes/"+id, ""), 200, map[string]any{"state": "running"})

	// Without a body: one, for 300 s.
	p.agent.FailChildren = nil
	a = p.call("POST", "/sandboxes/"+id+"/fork", ``)
	if err := json.Unmarshal([]byte(a.raw), &results); err != nil || len(results) != 1 || results[0].Sandbox == nil {
		t.Fatalf("%s: %v", a.raw, err)
	}
	end, err := time.Parse(time.RFC3339, p.call("GET", "/sandboxes/"+results[0].Sandbox.SandboxID, "").body["endAt"].(string))
	if left := time.Until(end); err != nil || left > 300*time.Second || left < 200*time.Second {
		t.Errorf("it lives for %v: %v", left, err)
	}
}

func TestForkThatIsNotBegunLeavesNothing(t *testing.T) {
	p := newPlane(t, rest.Config{})
	id := p.create(`{"templateID":"base"}`)
	p.agent.Fail("Fork", apierr.New(apierr.DiskFull, "full"))
	p.want(p.call("POST", "/sandboxes/"+id+"/fork", `{"count":3}`), 503, map[string]any{"error": "disk_full", "code": 503.0})
	if got := ids(t, p.call("GET", "/v2/sandboxes", "")); !slices.Equal(got, []string{id}) {
		t.Errorf("sandboxes %v", got)
	}
	p.want(p.call("DELETE", "/sandboxes/"+id, ""), 204, nil)
	p.want(p.call("POST", "/sandboxes/"+id+"/fork", ``), 404, map[string]any{"code": 404.0})
	p.want(p.call("POST", "/sandboxes/"+id+"/snapshots", ``), 404, map[string]any{"code": 404.0})
}

func TestRollback(t *testing.T) {
	p := newPlane(t, rest.Config{})
	id, other := p.create(`{"templateID":"base"}`), p.create(`{"templateID":"base"}`)
	snap := p.keep(id, `{"name":"good"}`)
	for _, ref := range []string{snap, "good", "good:default"} {
		p.want(p.call("POST", "/v1/sandboxes/"+id+"/rollback", `{"snapshotID":"`+ref+`"}`), 200, map[string]any{"sandboxID": id, "public": "running"})
	}
	// Another sandbox's snapshot is not told from one that does not exist.
	foreign := p.call("POST", "/v1/sandboxes/"+other+"/rollback", `{"snapshotID":"`+snap+`"}`)
	unknown := p.call("POST", "/v1/sandboxes/"+other+"/rollback", `{"snapshotID":"`+strings.Repeat("s", len(snap))+`"}`)
	p.want(foreign, 404, nil)
	if a, b := foreign.raw, strings.ReplaceAll(unknown.raw, strings.Repeat("s", len(snap)), snap); a != b {
		t.Errorf("%s\n%s", a, b)
	}
}

// What was being made when the control plane ended, and what was deleted while its agent was away, goes with the next sweep.
func TestUnfinishedSnapshotsAreSwept(t *testing.T) {
	p := newPlane(t, rest.Config{})
	id := p.create(`{"templateID":"base"}`)
	whole := p.keep(id, ``)
	half := store.Snapshot{ID: "shalf", SandboxID: id, TemplateID: "base", NodeID: "node1", CreatedAt: time.Now()}
	if err := p.store.InsertSnapshot(t.Context(), half); err != nil {
		t.Fatal(err)
	}
	if _, err := p.node.SnapshotCreate(t.Context(), id, half.ID); err != nil {
		t.Fatal(err)
	}
	sweep := func() {
		t.Helper()
		if err := fleet.NewSweeper(p.node, p.store, zerolog.Nop()).Sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	sweep()
	if got := p.agent.Snapshots(); len(got) != 2 {
		t.Errorf("one in the making was swept: %v", got)
	}
	if err := p.store.AbandonSnapshots(t.Context(), time.Now()); err != nil {
		t.Fatal(err)
	}
	if err := p.store.SnapshotReady(t.Context(), half.ID); err == nil {
		t.Error("an abandoned one became ready")
	}
	sweep()
	if got := p.agent.Snapshots(); !slices.Equal(got, []string{whole}) {
		t.Errorf("left: %v", got)
	}
}
