package kept

import (
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"torpor/agent/durable"
	"torpor/agent/snapcache"
	"torpor/api/apierr"
)

func open(t *testing.T, dir string) *Shelf {
	t.Helper()
	s, err := Open(dir, durable.OS{})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func keep(t *testing.T, s *Shelf, snapshotID, kind string) Info {
	t.Helper()
	d, err := s.Begin(snapshotID)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(d.Path("vmstate"), []byte(snapshotID), 0o600); err != nil {
		t.Fatal(err)
	}
	info, err := d.Publish(snapcache.Manifest{Kind: kind, Owner: "i1", Parent: "sha256:1", CreatedAt: time.UnixMilli(1)})
	if err != nil {
		t.Fatal(err)
	}
	return info
}

func wantCode(t *testing.T, err error, code apierr.Code) {
	t.Helper()
	if !errors.Is(err, &apierr.Error{Code: code}) {
		t.Errorf("got %v, want %s", err, code)
	}
}

func ids(s *Shelf) []string {
	found := []string{}
	for _, i := range s.List() {
		found = append(found, i.ID)
	}
	return found
}

func TestWhatIsKeptIsFoundAgain(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	keep(t, s, "b", Asked)
	keep(t, s, "a", Asked)
	keep(t, s, "f", Passing)
	if _, err := s.Begin("half"); err != nil { // never published
		t.Fatal(err)
	}
	if got := ids(s); len(got) != 2 || got[0] != "a" || got[1] != "b" {
		t.Errorf("listed %v", got)
	}
	if _, ok := s.Get("f"); !ok {
		t.Error("one for a fork is not there while the agent runs")
	}

	s = open(t, dir)
	if got := ids(s); len(got) != 2 {
		t.Errorf("after a restart %v", got)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 2 {
		t.Errorf("%d directories left: %v", len(left), err)
	}
	if got := s.Digests(); len(got) != 1 || got[0] != "sha256:1" {
		t.Errorf("digests %v", got)
	}
	if info, ok := s.Get("a"); !ok || info.Manifest.Owner != "i1" || info.SizeBytes == 0 {
		t.Errorf("got %+v", info)
	}
}

func TestAnIDIsTakenOnce(t *testing.T) {
	s := open(t, t.TempDir())
	d, err := s.Begin("a")
	if err != nil {
		t.Fatal(err)
	}
	_, err = s.Begin("a")
	wantCode(t, err, apierr.InTransition)
	if _, _, err := s.Take("a"); !errors.Is(err, &apierr.Error{Code: apierr.NotFound}) {
		t.Errorf("one in the making was taken: %v", err)
	}
	wantCode(t, s.Delete("a"), apierr.NotFound)
	if err := d.Discard(); err != nil {
		t.Fatal(err)
	}
	keep(t, s, "a", Asked)
	_, err = s.Begin("../a")
	wantCode(t, err, apierr.BadRequest)
}

// Whoever has taken a snapshot has its files until it lets go; nobody else can take it meanwhile.
func TestDeleteWaitsForThoseWhoHaveIt(t *testing.T) {
	s := open(t, t.TempDir())
	keep(t, s, "a", Asked)
	snap, release, err := s.Take("a")
	if err != nil {
		t.Fatal(err)
	}
	var gone atomic.Bool
	deleted := make(chan error, 1)
	go func() {
		err := s.Delete("a")
		gone.Store(true)
		deleted <- err
	}()
	for {
		_, again, err := s.Take("a")
		if err != nil {
			wantCode(t, err, apierr.NotFound)
			break
		}
		again()
	}
	if _, err := os.Stat(snap.Path("vmstate")); err != nil || gone.Load() {
		t.Errorf("deleted under our hands: %v", err)
	}
	release()
	release() // harmless
	if err := <-deleted; err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(snap.Dir); !os.IsNotExist(err) {
		t.Errorf("its files are still there: %v", err)
	}
	wantCode(t, s.Delete("a"), apierr.NotFound)
	keep(t, s, "a", Asked)
}

func TestADamagedOneIsNamedAndCanBeDeleted(t *testing.T) {
	dir := t.TempDir()
	keep(t, open(t, dir), "a", Asked)
	if err := os.Truncate(filepath.Join(dir, "a", "vmstate"), 0); err != nil {
		t.Fatal(err)
	}
	s := open(t, dir)
	_, _, err := s.Take("a")
	wantCode(t, err, apierr.SandboxBroken)
	if len(ids(s)) != 0 {
		t.Error("it is listed")
	}
	if err := s.Delete("a"); err != nil {
		t.Error(err)
	}
	if len(ids(open(t, dir))) != 0 {
		t.Error("it is back")
	}
}
