package main

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
)

// snapshotPlane answers what the commands ask, and remembers it with the bodies.
func snapshotPlane(t *testing.T) (asked *[]string, env map[string]string) {
	t.Helper()
	asked = &[]string{}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		*asked = append(*asked, strings.TrimSpace(r.Method+" "+r.URL.RequestURI()+" "+string(body)))
		switch r.Method + " " + r.URL.Path {
		case "POST /sandboxes/i1/fork":
			w.WriteHeader(http.StatusCreated)
			io.WriteString(w, `[{"sandbox":{"sandboxID":"c1"}},{"error":{"code":503,"message":"service unavailable: no room","error":"disk_full"}},{"sandbox":{"sandboxID":"c3"}}]`)
		case "POST /sandboxes/i1/snapshots":
			w.WriteHeader(http.StatusCreated)
			io.WriteString(w, `{"snapshotID":"s1","names":[]}`)
		case "GET /snapshots":
			if r.URL.Query().Get("nextToken") == "" {
				w.Header().Set("X-Next-Token", "more")
				io.WriteString(w, `[{"snapshotID":"s2","names":["good:default"]}]`)
				return
			}
			io.WriteString(w, `[{"snapshotID":"s1","names":[]}]`)
		case "GET /v1/sandboxes/i1/snapshots":
			if r.URL.Query().Get("after") == "" {
				io.WriteString(w, `{"snapshots":[{"snapshotID":"s2","names":["good:default"],"createdAt":"2026-01-02T03:04:05Z","sizeBytes":1572864}],"next":"s2"}`)
				return
			}
			io.WriteString(w, `{"snapshots":[],"next":null}`)
		case "DELETE /templates/good:v1":
			w.WriteHeader(http.StatusNoContent)
		case "POST /v1/sandboxes/i1/rollback":
			io.WriteString(w, `{"sandboxID":"i1"}`)
		default:
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprintf(w, `{"code":404,"message":"no such thing: %s","error":"not_found"}`, r.URL.Path)
		}
	}))
	t.Cleanup(srv.Close)
	return asked, map[string]string{"E2B_API_URL": srv.URL, "E2B_API_KEY": testKey}
}

func TestSnapshotCommands(t *testing.T) {
	for _, c := range []struct {
		line   string
		code   int
		stdout string
		stderr string // part of it
		asked  []string
	}{
		{
			"fork i1 -n 3 --timeout 1m", 1, "c1\nc3\n", "fork 2 of 3: service unavailable: no room",
			[]string{`POST /sandboxes/i1/fork {"count":3,"timeout":60}`},
		},
		{"fork i1 --timeout 1ms", 1, "", "at least 1s", nil},
		{"snapshot create i1", 0, "s1\n", "", []string{`POST /sandboxes/i1/snapshots {}`}},
		{"snapshot create i1 --name good:v1", 0, "s1\n", "", []string{`POST /sandboxes/i1/snapshots {"name":"good:v1"}`}},
		{"snapshot list", 0, "SNAPSHOT  NAMES\ns2        good:default\ns1        -\n", "", []string{"GET /snapshots?nextToken=", "GET /snapshots?nextToken=more"}},
		{
			"snapshot list i1", 0, "SNAPSHOT  NAMES         CREATED               MIB\ns2        good:default  2026-01-02T03:04:05Z  1.5\n", "",
			[]string{"GET /v1/sandboxes/i1/snapshots", "GET /v1/sandboxes/i1/snapshots?after=s2"},
		},
		{"snapshot rm good:v1 nosuch", 1, "", "no such thing", []string{"DELETE /templates/good:v1", "DELETE /templates/nosuch"}},
		{"rollback i1 s1", 0, "", "", []string{`POST /v1/sandboxes/i1/rollback {"snapshotID":"s1"}`}},
		{"rollback i9 s1", 1, "", "no such thing", []string{`POST /v1/sandboxes/i9/rollback {"snapshotID":"s1"}`}},
	} {
		t.Run(c.line, func(t *testing.T) {
			asked, env := snapshotPlane(t)
			got := runApp(t, env, "", strings.Fields(c.line)...)
			if got.code != c.code || got.stdout != c.stdout || !strings.Contains(got.stderr, c.stderr) || c.stderr == "" && got.stderr != "" {
				t.Errorf("%+v", got)
			}
			if !slices.Equal(*asked, c.asked) {
				t.Errorf("asked %q, want %q", *asked, c.asked)
			}
		})
	}
}
