package store_test

import (
	"context"
	"database/sql"
	"errors"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"torpor/agent/store"
)

func open(t *testing.T, path string) *store.Store {
	t.Helper()
	s, err := store.Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func full(id string) store.Sandbox {
	at := time.UnixMilli(1_700_000_000_123).UTC()
	return store.Sandbox{
		ID: id, TemplateID: "base", TemplateDigest: "sha256:aa", Token: "t", Env: map[string]string{"A": "1"},
		OnTimeout: "pause", AutoResume: true, Timeout: 300 * time.Second, VCPUs: 2, MemoryBytes: 512 << 20, DiskBytes: 4 << 30,
		State: "running", Reason: "r", Since: at, CreatedAt: at, StartedAt: at, EndAt: at.Add(time.Hour),
		Incarnation: 7, Generation: 3, Layers: []string{"1.layer", "2.layer"}, NextLayer: 3, EnvdVersion: "0.6.13", NextGen: 4, Base: 2, Booted: true, ResumeMode: "memory",
		Proc: store.Proc{PID: 42, Start: 1 << 40, Boot: "b"},
	}
}

func TestEveryFieldSurvivesReopening(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent ?#%.db") // characters with a meaning in a DSN
	s := open(t, path)
	want := full("i1")
	event := store.Event{
		At: want.Since, Type: "vm", From: "creating", To: "running", Reason: "r", Incarnation: 7,
		Phases: map[string]float64{"restore": 1.5},
	}
	if err := s.Put(t.Context(), want, event); err != nil {
		t.Fatal(err)
	}
	s.Close()

	s = open(t, path)
	got, err := s.Sandbox(t.Context(), "i1")
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v\nwant %+v", got, err, want)
	}
	all, err := s.Sandboxes(t.Context())
	if err != nil || len(all) != 1 || !reflect.DeepEqual(all[0], want) {
		t.Errorf("all: %+v, %v", all, err)
	}
	event.Seq = 1
	events, err := s.Events(t.Context(), "i1", 0, 10)
	if err != nil || len(events) != 1 || !reflect.DeepEqual(events[0], event) {
		t.Errorf("events: %+v, %v", events, err)
	}
	if v := reflect.ValueOf(want); true {
		for i := range v.NumField() {
			if name := v.Type().Field(i).Name; v.Field(i).IsZero() && name != "RemovedAt" {
				t.Errorf("the test leaves %s zero and so does not test it", name)
			}
		}
	}
}

func TestUnknownIsTyped(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "a.db"))
	if _, err := s.Sandbox(t.Context(), "nope"); !errors.Is(err, store.ErrUnknown) {
		t.Errorf("got %v", err)
	}
}

func TestEventsArePagedAndKeptApart(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "a.db"))
	for range 5 {
		for _, id := range []string{"a", "b"} {
			if err := s.Append(t.Context(), id, store.Event{Type: "envd", To: id}); err != nil {
				t.Fatal(err)
			}
		}
	}
	var seen int
	var after uint64
	for {
		page, err := s.Events(t.Context(), "a", after, 2)
		if err != nil {
			t.Fatal(err)
		}
		if len(page) == 0 {
			break
		}
		for _, e := range page {
			if e.To != "a" || e.Seq <= after {
				t.Fatalf("wrong event %+v after %d", e, after)
			}
			after = e.Seq
			seen++
		}
	}
	if seen != 5 {
		t.Errorf("saw %d events, want 5", seen)
	}
}

func TestNewerSchemaIsRefusedByName(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.db")
	open(t, path).Close()
	db, err := sql.Open("sqlite3", path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.Exec(`INSERT INTO goose_db_version (version_id, is_applied) VALUES (99, 1)`); err != nil {
		t.Fatal(err)
	}
	db.Close()
	if _, err := store.Open(t.Context(), path); err == nil || !strings.Contains(err.Error(), "schema version 99") {
		t.Errorf("got %v", err)
	}
}

func TestOpeningTwiceKeepsTheData(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.db")
	s := open(t, path)
	if err := s.PutTemplate(t.Context(), store.Template{ID: "base", Digest: "d", State: "failed", Error: "no kernel"}); err != nil {
		t.Fatal(err)
	}
	s.Close()
	got, err := open(t, path).Templates(t.Context())
	if err != nil || len(got) != 1 || got[0].Error != "no kernel" {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestConcurrentWritersDoNotFail(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "a.db"))
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 10 {
				if err := s.Put(context.Background(), full(string(rune('a'+i))), store.Event{Type: "vm"}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}
