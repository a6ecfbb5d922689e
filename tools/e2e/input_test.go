package e2e

import (
	"encoding/json"
	"errors"
	"net/http"
	"testing"

	"torpor/tools/rest"
)

const unknownID = "i00000000000000000000"

// Bad input is answered with its status, in a body SDKs understand, and changes nothing.
func TestBadInput(t *testing.T) {
	running := newSandbox(t, rest.NewSandbox{Metadata: map[string]string{"for": "bad input"}}).SandboxID
	paused := newSandbox(t, rest.NewSandbox{}).SandboxID
	pause(t, paused)
	before := snapshotOf(t, running, paused)

	badKey, noKey := *sys.Client, *sys.Client
	badKey.Key, noKey.Key = "e2b_"+"0123456789abcdef0123456789abcdef01234567", ""
	const create, v1, createV2 = http.MethodPost, "/sandboxes", "/v2/sandboxes"
	cases := []struct {
		name         string
		client       *rest.Client
		method, path string
		body         string
		status       int
	}{
		{"no key", &noKey, http.MethodGet, "/v2/sandboxes", "", 401},
		{"wrong key", &badKey, http.MethodGet, "/v2/sandboxes", "", 401},
		{"no key, create", &noKey, create, createV2, `{"templateID":"base"}`, 401},
		{"wrong key, kill", &badKey, http.MethodDelete, "/sandboxes/" + running, "", 401},
		{"wrong key, pause", &badKey, http.MethodPost, "/sandboxes/" + running + "/pause", "{}", 401},
		{"no key, unknown route", &noKey, http.MethodGet, "/nothing/here", "", 401},
		{"unknown route", sys.Client, http.MethodGet, "/nothing/here", "", 404},
		{"unknown template", sys.Client, create, createV2, `{"templateID":"no-such-template"}`, 404},
		{"unknown template, v1", sys.Client, create, v1, `{"templateID":"no-such-template","timeout":300}`, 404},
		{"malformed JSON", sys.Client, create, createV2, `{"templateID":`, 400},
		{"malformed JSON, v1", sys.Client, create, v1, `templateID=base`, 400},
		{"JSON that is no object", sys.Client, create, createV2, `[]`, 400},
		{"two objects", sys.Client, create, createV2, `{"templateID":"base"}{}`, 400},
		{"no body", sys.Client, create, createV2, ``, 400},
		{"negative timeout", sys.Client, create, createV2, `{"templateID":"base","timeout":-1}`, 400},
		{"negative timeout, v1", sys.Client, create, v1, `{"templateID":"base","timeout":-1}`, 400},
		{"huge timeout", sys.Client, create, createV2, `{"templateID":"base","timeout":99999999999}`, 400},
		{"timeout beyond 64 bits", sys.Client, create, createV2, `{"templateID":"base","timeout":1e30}`, 400},
		{"fractional timeout", sys.Client, create, createV2, `{"templateID":"base","timeout":1.5}`, 400},
		{"timeout of wrong type", sys.Client, create, createV2, `{"templateID":"base","timeout":"300"}`, 400},
		{"template of wrong type", sys.Client, create, createV2, `{"templateID":7}`, 400},
		{"metadata of wrong type", sys.Client, create, createV2, `{"templateID":"base","metadata":"x"}`, 400},
		{"metadata value of wrong type", sys.Client, create, createV2, `{"templateID":"base","metadata":{"a":1}}`, 400},
		{"variables of wrong type", sys.Client, create, createV2, `{"templateID":"base","envVars":["A=1"]}`, 400},
		{"autoPause of wrong type", sys.Client, create, createV2, `{"templateID":"base","autoPause":"yes"}`, 400},
		{"get unknown", sys.Client, http.MethodGet, "/sandboxes/" + unknownID, "", 404},
		{"pause unknown", sys.Client, http.MethodPost, "/sandboxes/" + unknownID + "/pause", "{}", 404},
		{"connect unknown", sys.Client, http.MethodPost, "/v2/sandboxes/" + unknownID + "/connect", "{}", 404},
		{"connect unknown, v1", sys.Client, http.MethodPost, "/sandboxes/" + unknownID + "/connect", `{"timeout":60}`, 404},
		{"timeout of unknown", sys.Client, http.MethodPost, "/sandboxes/" + unknownID + "/timeout", `{"timeout":60}`, 404},
		{"kill unknown", sys.Client, http.MethodDelete, "/sandboxes/" + unknownID, "", 404},
		{"state of unknown", sys.Client, http.MethodGet, "/v1/sandboxes/" + unknownID + "/state", "", 404},
		{"watch unknown", sys.Client, http.MethodGet, "/v1/sandboxes/" + unknownID + "/state?watch=true", "", 404},
		{"events of unknown", sys.Client, http.MethodGet, "/v1/sandboxes/" + unknownID + "/events", "", 404},
		{"console of unknown", sys.Client, http.MethodGet, "/v1/sandboxes/" + unknownID + "/console", "", 404},
		{"pause of a paused one", sys.Client, http.MethodPost, "/sandboxes/" + paused + "/pause", "{}", 409},
		{"pause with malformed JSON", sys.Client, http.MethodPost, "/sandboxes/" + running + "/pause", "{", 400},
		{"connect with negative timeout", sys.Client, http.MethodPost, "/v2/sandboxes/" + running + "/connect", `{"timeout":-5}`, 400},
		{"connect with zero timeout, v1", sys.Client, http.MethodPost, "/sandboxes/" + running + "/connect", `{"timeout":0}`, 400},
		{"connect with huge timeout", sys.Client, http.MethodPost, "/v2/sandboxes/" + running + "/connect", `{"timeout":99999999999}`, 400},
		{"connect with timeout of wrong type", sys.Client, http.MethodPost, "/v2/sandboxes/" + paused + "/connect", `{"timeout":[]}`, 400},
		{"huge timeout of a running one", sys.Client, http.MethodPost, "/sandboxes/" + running + "/timeout", `{"timeout":1e30}`, 400},
		{"timeout of a paused one", sys.Client, http.MethodPost, "/sandboxes/" + paused + "/timeout", `{"timeout":60}`, 404},
		{"list with unknown state", sys.Client, http.MethodGet, "/v2/sandboxes?state=asleep", "", 400},
		{"list with unknown order", sys.Client, http.MethodGet, "/v2/sandboxes?order=sideways", "", 400},
		{"list with bad limit", sys.Client, http.MethodGet, "/v2/sandboxes?limit=-1", "", 400},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			var body any
			if c.method != http.MethodGet {
				body = []byte(c.body)
			}
			_, err := c.client.Do(within(t, callLimit), c.method, c.path, body, nil)
			wantError(t, err, c.status)
		})
	}
	if after := snapshotOf(t, running, paused); after != before {
		t.Errorf("bad input changed something.\nbefore: %s\nafter:  %s", before, after)
	}
}

// wantError demands an answer of that status whose body says the same, as the JS SDK reads it from there.
func wantError(t *testing.T, err error, status int) {
	t.Helper()
	var e *rest.Error
	if !errors.As(err, &e) || e.Status != status {
		t.Fatalf("got %d (%v), want %d", rest.StatusOf(err), err, status)
	}
	var body struct {
		Code    int
		Message string
	}
	if err := json.Unmarshal(e.Body, &body); err != nil || body.Code != status || body.Message == "" {
		t.Errorf("the body of a %d is %s (%v)", status, e.Body, err)
	}
}

// snapshotOf is everything about some sandboxes, and which there are, that bad input may not change.
func snapshotOf(t *testing.T, ids ...string) string {
	t.Helper()
	list, err := sys.List(within(t, callLimit), "")
	if err != nil {
		t.Fatal(err)
	}
	states := []any{list}
	for _, id := range ids {
		s := state(t, id)
		states = append(states, s.SandboxID, s.Incarnation, s.Public, s.VM, s.Envd.State, s.Envd.Incarnation, s.EndAt, s.Lifecycle)
	}
	text, err := json.Marshal(states)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
