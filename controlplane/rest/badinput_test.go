package rest_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"torpor/controlplane/rest"
)

// Whatever is wrong with a request: a JSON body with code and message, and nothing changed.
func TestBadInputChangesNothing(t *testing.T) {
	p := newPlane(t, rest.Config{})
	id := p.create(`{"templateID":"base","metadata":{"k":"v"}}`)
	before, calls := p.call("GET", "/v1/sandboxes/"+id+"/state", ""), p.agent.Changes()
	on := func(route string) string { return strings.ReplaceAll(route, "ID", id) }

	for _, c := range []struct {
		route, body string
		status      int
		message     string // part of it
	}{
		{"POST /v2/sandboxes", `{"templateID":"nope"}`, 404, `template "nope" not found`},
		{"POST /sandboxes", `{"templateID":"base:v2"}`, 404, "not found"},
		{"POST /v2/sandboxes", ``, 400, "needs a JSON body"},
		{"POST /v2/sandboxes", `   `, 400, "needs a JSON body"},
		{"POST /v2/sandboxes", `{}`, 400, `"templateID" is required`},
		{"POST /v2/sandboxes", `{"templateID":"base"`, 400, "not valid JSON"},
		{"POST /v2/sandboxes", `{"templateID":"base"} x`, 400, "goes on after"},
		{"POST /v2/sandboxes", `{"templateID":"base"}{}`, 400, "goes on after"},
		{"POST /v2/sandboxes", `["base"]`, 400, "must be a JSON object"},
		{"POST /v2/sandboxes", `null`, 400, "must be a JSON object"},
		{"POST /v2/sandboxes", "{\"templateID\":\"\xff\"}", 400, "UTF-8"},
		{"POST /v2/sandboxes", `{"templateID":7}`, 400, `"templateID"`},
		{"POST /v2/sandboxes", `{"templateID":"base","color":"red"}`, 400, `unknown field "color"`},
		{"POST /v2/sandboxes", `{"templateID":"base","network":{"x":1}}`, 400, `unknown field "x"`},
		{"POST /v2/sandboxes", `{"templateID":"base","timeout":"5"}`, 400, `"timeout"`},
		{"POST /v2/sandboxes", `{"templateID":"base","timeout":1.5}`, 400, `"timeout"`},
		{"POST /v2/sandboxes", `{"templateID":"base","timeout":1e300}`, 400, `"timeout"`},
		{"POST /v2/sandboxes", `{"templateID":"base","timeout":0}`, 400, "Timeout must be greater than 0"},
		{"POST /sandboxes", `{"templateID":"base","timeout":-1}`, 400, "Timeout must be greater than 0"},
		{"POST /v2/sandboxes", `{"templateID":"base","timeout":86401}`, 400, "Timeout cannot be greater than 86400"},
		{"POST /v2/sandboxes", `{"templateID":"base","timeout":9223372036854775807}`, 400, "Timeout cannot be greater"},
		{"POST /v2/sandboxes", `{"templateID":"base","metadata":{"a":1}}`, 400, `"metadata`},
		{"POST /v2/sandboxes", `{"templateID":"base","metadata":[]}`, 400, `"metadata"`},
		{"POST /v2/sandboxes", `{"templateID":"base","envVars":{"A=B":"x"}}`, 400, "envVars"},
		{"POST /v2/sandboxes", `{"templateID":"base","envVars":{"A":"\u0000"}}`, 400, "envVars"},
		{"POST /v2/sandboxes", `{"templateID":"base","envVars":{"":"x"}}`, 400, "envVars"},
		{"POST /v2/sandboxes", `{"templateID":"base","autoResume":{}}`, 400, "autoResume.enabled"},
		{"POST /v2/sandboxes", `{"templateID":"base","autoResume":true}`, 400, "autoResume"},
		{"POST /v2/sandboxes", `{"templateID":"base","metadata":{"a":"` + strings.Repeat("x", 1<<20) + `"}}`, 400, "larger than"},
		// What is not supported is named.
		{"POST /v2/sandboxes", `{"templateID":"base","secure":false}`, 400, "secure:false"},
		{"POST /v2/sandboxes", `{"templateID":"base","autoPause":true,"autoPauseMemory":false}`, 400, "autoPauseMemory:false"},
		{"POST /v2/sandboxes", `{"templateID":"base","mcp":{}}`, 400, `"mcp"`},
		{"POST /v2/sandboxes", `{"templateID":"base","iam":{"tokens":{}}}`, 400, `"iam"`},
		{"POST /v2/sandboxes", `{"templateID":"base","volumeMounts":[{"name":"v","path":"/v"}]}`, 400, "volumeMounts"},
		{"POST /v2/sandboxes", `{"templateID":"base","network":{"allowPublicTraffic":false}}`, 400, "network.allowPublicTraffic"},
		{"POST /v2/sandboxes", `{"templateID":"base","network":{"allowOut":["1.1.1.1"]}}`, 400, "network.allowOut"},
		{"POST /v2/sandboxes", `{"templateID":"base","network":{"denyOut":["0.0.0.0/0"]}}`, 400, "network.denyOut"},
		{"POST /v2/sandboxes", `{"templateID":"base","network":{"egressProxy":{"address":"x:1"}}}`, 400, "network.egressProxy"},
		{"POST /v2/sandboxes", `{"templateID":"base","network":{"maskRequestHost":"x"}}`, 400, "network.maskRequestHost"},
		{"POST /v2/sandboxes", `{"templateID":"base","network":{"rules":{}}}`, 400, "network.rules"},
		{"POST /v2/sandboxes", `{"templateID":"base","network":{"httpsPorts":[443]}}`, 400, "network.httpsPorts"},

		{"GET /sandboxes/nonexistingsandbox", "", 404, "not found"},
		{"GET /sandboxes/a-b", "", 400, "Invalid sandbox ID"},
		{"GET /sandboxes/a.b", "", 400, "Invalid sandbox ID"},
		{"GET /sandboxes/UPPER", "", 400, "Invalid sandbox ID"},
		{"GET /sandboxes/a%2Fb", "", 400, "Invalid sandbox ID"},
		{"DELETE /sandboxes/nonexistingsandbox", "", 404, "not found"},
		{"DELETE /sandboxes/a-b", "", 400, "Invalid sandbox ID"},
		{"POST /sandboxes/nonexistingsandbox/pause", "", 404, "not found"},
		{"POST /sandboxes/nonexistingsandbox/timeout", `{"timeout":1}`, 404, "not found"},
		{"POST /v2/sandboxes/nonexistingsandbox/connect", ``, 404, "not found"},
		{"POST /sandboxes/nonexistingsandbox/resume", ``, 404, "not found"},
		{"POST /sandboxes/nonexistingsandbox/refreshes", ``, 404, "not found"},
		{"GET /v1/sandboxes/nonexistingsandbox/state", ``, 404, "not found"},
		{"GET /v1/sandboxes/nonexistingsandbox/events", ``, 404, "not found"},
		{"GET /v1/sandboxes/nonexistingsandbox/console", ``, 404, "not found"},
		{"POST /v1/sandboxes/nonexistingsandbox/exec", `{"cmd":"x"}`, 404, "not found"},

		{"POST /sandboxes/ID/pause", `{"memory":false}`, 400, "memory:false"},
		{"POST /sandboxes/ID/pause", `{"memory":"x"}`, 400, `"memory"`},
		{"POST /sandboxes/ID/pause", `{`, 400, "not valid JSON"},
		{"POST /sandboxes/ID/connect", ``, 400, "needs a JSON body"},
		{"POST /sandboxes/ID/connect", `{}`, 400, `"timeout" is required`},
		{"POST /sandboxes/ID/connect", `{"timeout":0}`, 400, "Timeout must be greater than 0"},
		{"POST /v2/sandboxes/ID/connect", `{"timeout":-1}`, 400, "Timeout must be greater than 0"},
		{"POST /v2/sandboxes/ID/connect", `{"timeout":999999999}`, 400, "Timeout cannot be greater"},
		{"POST /v2/sandboxes/ID/connect", `{"autoPause":true}`, 400, "autoPause"},
		{"POST /v2/sandboxes/ID/connect", `{"x":1}`, 400, `unknown field "x"`},
		{"POST /sandboxes/ID/resume", `{"timeout":0}`, 400, "Timeout must be greater than 0"},
		{"POST /sandboxes/ID/timeout", ``, 400, "needs a JSON body"},
		{"POST /sandboxes/ID/timeout", `{}`, 400, `"timeout" is required`},
		{"POST /sandboxes/ID/timeout", `{"timeout":86401}`, 400, "Timeout cannot be greater"},
		{"POST /sandboxes/ID/timeout", `{"timeout":true}`, 400, `"timeout"`},
		{"POST /sandboxes/ID/refreshes", `{"duration":3601}`, 400, "duration"},
		{"POST /sandboxes/ID/refreshes", `{"duration":-1}`, 400, "duration"},
		{"POST /v1/sandboxes/ID/exec", `{"cmd":""}`, 400, "cmd"},
		{"POST /v1/sandboxes/ID/exec", `{"cmd":"x","user":"a:b"}`, 400, "user"},
		{"POST /v1/sandboxes/ID/exec", `{"cmd":"x","timeout":0}`, 400, "Timeout"},
		{"POST /v1/sandboxes/ID/exec", `{"cmd":"x","envVars":{"=":""}}`, 400, "envVars"},
		{"GET /v1/sandboxes/ID/state?watch=maybe", ``, 400, "watch"},
		{"GET /v1/sandboxes/ID/events?after=-1", ``, 400, "after"},
		{"GET /v1/sandboxes/ID/events?limit=0", ``, 400, "limit"},
		{"GET /v1/sandboxes?limit=x", ``, 400, "limit"},

		{"POST /sandboxes/ID/fork", `{"count":0}`, 400, `"count" must be between 1 and 100`},
		{"POST /sandboxes/ID/fork", `{"count":101}`, 400, `"count" must be between 1 and 100`},
		{"POST /sandboxes/ID/fork", `{"count":-1}`, 400, `"count" must be between 1 and 100`},
		{"POST /sandboxes/ID/fork", `{"count":1.5}`, 400, `"count"`},
		{"POST /sandboxes/ID/fork", `{"timeout":0}`, 400, "Timeout must be greater than 0"},
		{"POST /sandboxes/ID/fork", `{"timeout":86401}`, 400, "Timeout cannot be greater"},
		{"POST /sandboxes/ID/fork", `{"n":1}`, 400, `unknown field "n"`},
		{"POST /sandboxes/nonexistingsandbox/fork", ``, 404, "not found"},
		{"POST /sandboxes/ID/snapshots", `{"name":""}`, 400, `"name"`},
		{"POST /sandboxes/ID/snapshots", `{"name":"a b"}`, 400, `"name"`},
		{"POST /sandboxes/ID/snapshots", `{"name":"team/a"}`, 400, `"name"`},
		{"POST /sandboxes/ID/snapshots", `{"name":"a:"}`, 400, `"name"`},
		{"POST /sandboxes/ID/snapshots", `{"name":"a:b:c"}`, 400, `"name"`},
		{"POST /sandboxes/ID/snapshots", `{"name":"a:123e4567-e89b-12d3-a456-426614174000"}`, 400, `"name"`},
		{"POST /sandboxes/ID/snapshots", `{"name":"` + strings.Repeat("x", 129) + `"}`, 400, `"name"`},
		{"POST /sandboxes/ID/snapshots", `{"name":"base"}`, 400, "template"},
		{"POST /sandboxes/ID/snapshots", `{"name":7}`, 400, `"name"`},
		{"POST /sandboxes/nonexistingsandbox/snapshots", ``, 404, "not found"},
		{"GET /snapshots?limit=101", ``, 400, "limit"},
		{"GET /snapshots?nextToken=x", ``, 400, "nextToken"},
		{"DELETE /templates/nosuchsnapshot", ``, 404, "not found"},
		{"DELETE /templates/a%2Fb%3Ac", ``, 404, "not found"},
		{"GET /v1/sandboxes/nonexistingsandbox/snapshots", ``, 404, "not found"},
		{"GET /v1/sandboxes/ID/snapshots?limit=0", ``, 400, "limit"},
		{"GET /v1/sandboxes/ID/snapshots?after=nosuchsnapshot", ``, 400, "after"},
		{"POST /v1/sandboxes/ID/rollback", ``, 400, "needs a JSON body"},
		{"POST /v1/sandboxes/ID/rollback", `{}`, 400, `"snapshotID" is required`},
		{"POST /v1/sandboxes/ID/rollback", `{"snapshotID":"nosuchsnapshot"}`, 404, "not found"},
		{"POST /v1/sandboxes/nonexistingsandbox/rollback", `{"snapshotID":"x"}`, 404, "not found"},

		{"GET /v2/sandboxes?limit=0", ``, 400, "limit"},
		{"GET /v2/sandboxes?limit=101", ``, 400, "limit"},
		{"GET /v2/sandboxes?state=gone", ``, 400, "state"},
		{"GET /v2/sandboxes?order=up", ``, 400, "order"},
		{"GET /v2/sandboxes?startedAfter=yesterday", ``, 400, "startedAfter"},
		{"GET /v2/sandboxes?template=base:v1", ``, 400, "template"},
		{"GET /v2/sandboxes?nextToken=x", ``, 400, "nextToken"},
		{"GET /v2/sandboxes?metadata=novalue", ``, 400, "metadata"},
		{"GET /v2/sandboxes?metadata=a%3D%2525zz", ``, 400, "metadata"},
		{"GET /sandboxes?metadata=novalue", ``, 400, "metadata"},
	} {
		method, path, _ := strings.Cut(on(c.route), " ")
		a := p.call(method, path, c.body)
		message, _ := a.body["message"].(string)
		if a.status != c.status || a.body["code"] != float64(c.status) || !strings.Contains(message, c.message) || a.body["error"] == nil {
			t.Errorf("%s %.80s: %d %s", c.route, c.body, a.status, a.raw)
		}
	}
	if now := p.agent.Changes(); !slices.Equal(now, calls) {
		t.Errorf("the agent was told to change something: %v", now[len(calls):])
	}
	after := p.call("GET", "/v1/sandboxes/"+id+"/state", "")
	delete(before.body, "observedAt")
	delete(after.body, "observedAt")
	if a, b := fmt.Sprint(before.body), fmt.Sprint(after.body); a != b {
		t.Errorf("the state changed:\n%s\n%s", a, b)
	}
}

func TestKeys(t *testing.T) {
	p := newPlane(t, rest.Config{})
	id := p.create(`{"templateID":"base"}`)
	calls := p.agent.Changes()
	for name, header := range map[string]map[string]string{
		"none":      nil,
		"empty":     {"X-API-KEY": ""},
		"wrong":     {"X-API-KEY": "e2b_" + strings.Repeat("0", 40)},
		"longer":    {"X-API-KEY": p.key + "0"},
		"shorter":   {"X-API-KEY": p.key[:43]},
		"as bearer": {"Authorization": "Bearer " + p.key},
	} {
		for _, route := range []string{
			"POST /v2/sandboxes", "POST /sandboxes", "GET /v2/sandboxes", "DELETE /sandboxes/" + id, "POST /sandboxes/" + id + "/pause",
			"GET /v1/sandboxes/" + id + "/state", "POST /v1/sandboxes/" + id + "/exec", "GET /v1/nodes", "GET /nowhere",
		} {
			method, path, _ := strings.Cut(route, " ")
			a := p.send(method, path, "", header)
			if a.status != 401 || a.body["code"] != 401.0 || a.body["error"] != "unauthorized" || a.body["message"] == "" {
				t.Errorf("%s, key %s: %d %s", route, name, a.status, a.raw)
			}
		}
	}
	if now := p.agent.Changes(); !slices.Equal(now, calls) {
		t.Errorf("changed: %v", now[len(calls):])
	}
}
