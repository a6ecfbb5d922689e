package store_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"torpor/controlplane/store"
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

func sandbox(id string) store.Sandbox {
	return store.Sandbox{
		ID: id, TemplateID: "base", Metadata: map[string]string{"user_id": "u", "k": "é\n"}, UserID: "u", AccessToken: "token of " + id,
		NodeID: "n", CreatedAt: time.UnixMilli(1700000000123).UTC(),
	}
}

func TestRowsSurviveAReopen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "odd ?name%#.db")
	s := open(t, path)
	want := sandbox("i1")
	if err := s.Insert(t.Context(), want); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	got, err := open(t, path).Get(t.Context(), "i1")
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v (%v)", got, want, err)
	}
}

func TestDeletedIsFinal(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "db"))
	if err := s.Insert(t.Context(), sandbox("i1")); err != nil {
		t.Fatal(err)
	}
	if err := s.Insert(t.Context(), sandbox("i1")); err == nil {
		t.Error("an id was used twice")
	}
	for i, want := range []bool{true, false} {
		if first, err := s.MarkDeleted(t.Context(), "i1", time.Now()); first != want || err != nil {
			t.Errorf("delete %d: first=%v %v", i, first, err)
		}
	}
	if first, err := s.MarkDeleted(t.Context(), "iunknown", time.Now()); first || err != nil {
		t.Errorf("unknown: %v %v", first, err)
	}
	if _, err := s.Get(t.Context(), "i1"); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("Get: %v", err)
	}
	if _, err := s.ByToken(t.Context(), "token of i1"); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("ByToken: %v", err)
	}
	if row, err := s.Record(t.Context(), "i1"); err != nil || row.DeletedAt.IsZero() {
		t.Errorf("Record: %+v %v", row, err)
	}
	for id, want := range map[string]bool{"i1": true, "iunknown": false} {
		if deleted, err := s.Deleted(t.Context(), id); deleted != want || err != nil {
			t.Errorf("Deleted(%s): %v %v", id, deleted, err)
		}
	}
	if err := s.Insert(t.Context(), sandbox("i1")); err == nil {
		t.Error("the id of a deleted sandbox was used again")
	}
}

func TestFindByTokenAndByMany(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "db"))
	var ids []string
	for i := range 1203 { // more than one batch
		sb := sandbox(fmt.Sprintf("i%d", i))
		if i%400 != 0 {
			sb.AccessToken = ""
		}
		ids = append(ids, sb.ID)
		if i < 3 || i%100 == 0 {
			if err := s.Insert(t.Context(), sb); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := s.MarkDeleted(t.Context(), "i1", time.Now()); err != nil {
		t.Fatal(err)
	}
	rows, err := s.Live(t.Context(), ids)
	if err != nil || len(rows) != 14 || rows["i1200"].ID != "i1200" {
		t.Errorf("%d rows: %v", len(rows), err)
	}
	if rows, err := s.Live(t.Context(), nil); err != nil || len(rows) != 0 {
		t.Errorf("%v %v", rows, err)
	}
	if got, err := s.ByToken(t.Context(), "token of i400"); err != nil || got.ID != "i400" {
		t.Errorf("%+v %v", got, err)
	}
	for _, token := range []string{"", "token of i1", "token of i40", strings.ToUpper("token of i400")} {
		if _, err := s.ByToken(t.Context(), token); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("%q: %v", token, err)
		}
	}
}

func TestOpenSaysWhichFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "no", "such", "dir", "db")
	if _, err := store.Open(t.Context(), path); err == nil || !strings.Contains(err.Error(), path) {
		t.Error(err)
	}
}
