package rest

import (
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"torpor/api/agentpb"
	"torpor/api/apierr"
	"torpor/controlplane/store"
)

func FuzzMetadataFilter(f *testing.F) {
	for _, s := range []string{"", "k=v", "a%20b=c%26d%3D%C3%A9", "a%2520b=c%2526d%253D%25C3%25A9", "=", "&", "a=b&a=c", "%", "%25zz=1", "a=b=c"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		pairs, err := parseMetadata(s)
		if err != nil {
			if apierr.As(err).HTTP() != 400 {
				t.Errorf("%q: %v", s, err)
			}
			return
		}
		// What was understood, encoded as SDKs do, is understood as the same.
		var parts []string
		for k, v := range pairs {
			parts = append(parts, escape(escape(k))+"="+escape(escape(v)))
		}
		again, err := parseMetadata(strings.Join(parts, "&"))
		if err != nil || len(again) != len(pairs) {
			t.Fatalf("%q: %v became %v, %v", s, pairs, again, err)
		}
		for k, v := range pairs {
			if again[k] != v {
				t.Errorf("%q: %q=%q became %q", s, k, v, again[k])
			}
		}
	})
}

// escape is encodeURIComponent.
func escape(s string) string { return strings.ReplaceAll(url.QueryEscape(s), "+", "%20") }

func FuzzCursor(f *testing.F) {
	f.Add("")
	f.Add("MjAyNi0wMS0wMVQwMDowMDowMFpfX2kx")
	f.Add(cursor{time.Unix(1, 5e6), "i1", true}.String())
	f.Fuzz(func(t *testing.T, s string) {
		c, err := parseCursor(s)
		if err != nil {
			if apierr.As(err).HTTP() != 400 {
				t.Error(err)
			}
			return
		}
		again, err := parseCursor(c.String())
		if err != nil || !again.startedAt.Equal(c.startedAt) || again.id != c.id || again.ascending != c.ascending {
			t.Errorf("%q: %+v became %+v, %v", s, c, again, err)
		}
		filter{after: c, limit: 1}.page([]entry{{store.Sandbox{ID: "i1"}, &agentpb.Sandbox{}}})
	})
}

func FuzzCreateBody(f *testing.F) {
	for _, s := range []string{
		`{"templateID":"base"}`, `{"templateID":"base","timeout":300,"secure":true,"allow_internet_access":true}`, `{`, `{}`, `[]`,
		`{"templateID":"base","network":{"rules":{}},"autoResume":{"enabled":false}}`, `{"templateID":"a","envVars":{"A":"b"},"metadata":{"k":"v"}}`,
		`{"templateID":"a","mcp":{"x":[1,2,{}]},"volumeMounts":[{}]}`, "{\"templateID\":\"\x00\"}",
	} {
		f.Add(s, true)
		f.Add(s, false)
	}
	a := &API{cfg: Config{MaxTimeout: time.Hour}}
	f.Fuzz(func(t *testing.T, body string, v2 bool) {
		req, err := a.createRequest(httptest.NewRequest("POST", "/sandboxes", strings.NewReader(body)), v2)
		if err != nil {
			if apierr.As(err).HTTP() != 400 {
				t.Errorf("%q: %v", body, err)
			}
			return
		}
		if req.TemplateID == "" || req.Timeout == nil || *req.Timeout < 1 || *req.Timeout > 3600 || req.Metadata == nil {
			t.Errorf("%q was let through as %+v", body, req)
		}
		if req.AutoResume != nil && req.AutoResume.Enabled == nil {
			t.Errorf("%q: autoResume without enabled", body)
		}
	})
}

func FuzzSnapshotName(f *testing.F) {
	for _, s := range []string{"", "a", "A-b_9:v1.0", "a:", ":a", "a:b:c", "a/b", "a:123e4567-e89b-12d3-a456-426614174000", "\xff"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		name, tag, err := newName(&s)
		if err != nil {
			if apierr.As(err).HTTP() != 400 {
				t.Errorf("%q: %v", s, err)
			}
			return
		}
		// What was taken is found again under what is told of it.
		spelled := namesOf(store.Snapshot{Name: name, Tag: tag})
		if len(spelled) != 1 {
			t.Fatalf("%q is spelled %v", s, spelled)
		}
		again, againTag, ok := parseName(spelled[0])
		if !ok || again != name || againTag != tag || tag == "" {
			t.Errorf("%q: %q:%q became %q:%q", s, name, tag, again, againTag)
		}
		if ways := filters(spelled[0], defaultTag); len(ways) != 2 || ways[1].Name != name || ways[1].Tag != tag {
			t.Errorf("%q: %+v", s, ways)
		}
	})
}
