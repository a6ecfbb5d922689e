package machine

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/rs/zerolog"
	"golang.org/x/sys/unix"

	"torpor/vmm/guestmem"
	"torpor/vmm/snapshot"
)

// record asks a machine for its working set and reads it back.
func record(t *testing.T, m *Machine, path string) *snapshot.WorkingSet {
	t.Helper()
	all, written, err := m.WorkingSet(openFile(t, path, os.O_CREATE|os.O_TRUNC|os.O_RDWR))
	if err != nil {
		t.Fatal(err)
	}
	f := openFile(t, path, os.O_RDONLY)
	defer f.Close()
	w, err := snapshot.ReadWorkingSet(f)
	if err != nil {
		t.Fatal(err)
	}
	if a, wr := w.Pages(); a != all || wr != written {
		t.Errorf("the file has %d pages, %d written; told %d, %d", a, wr, all, written)
	}
	return w
}

func runOf(w *snapshot.WorkingSet, page uint64) (snapshot.Touched, bool) {
	i := slices.IndexFunc(w.Runs, func(r snapshot.Touched) bool { return uint64(r.Page) <= page && page < r.End() })
	if i < 0 {
		return snapshot.Touched{}, false
	}
	return w.Runs[i], true
}

const (
	earlyPage, latePage, readPage, idlePage = 0x2800, 0x3000, 0x2100, 0x3800
)

// savedWithData is a snapshot of a tiny guest with something in the pages of these tests.
func savedWithData(t *testing.T, cfg Config) savedFiles {
	t.Helper()
	m := bootTiny(t, cfg)
	counts(t, m, 0)
	for _, page := range []guestmem.Addr{earlyPage, latePage, readPage, idlePage} {
		m.poke(t, page*snapshot.PageSize, 1)
	}
	full, _ := save(t, m, "")
	return full
}

func TestWorkingSetIsRecordedAndPrefetched(t *testing.T) {
	cfg := testConfig(1, 128*mib)
	full := savedWithData(t, cfg)
	path := filepath.Join(t.TempDir(), "ws")

	m := restoreTiny(t, cfg, full)
	m.poke(t, earlyPage*snapshot.PageSize, 2)
	m.peek(t, readPage*snapshot.PageSize)
	record(t, m, path)
	m.poke(t, latePage*snapshot.PageSize, 2)
	w := record(t, m, path)

	if r, ok := runOf(w, earlyPage); !ok || r.Stage != 0 || !r.Written {
		t.Errorf("a page written before the first recording: %+v, %v", r, ok)
	}
	if r, ok := runOf(w, latePage); !ok || r.Stage != 1 || !r.Written {
		t.Errorf("a page written after it: %+v, %v", r, ok)
	}
	if r, ok := runOf(w, readPage); !ok || r.Stage != 0 || r.Written {
		t.Errorf("a page that was read: %+v, %v", r, ok)
	}
	if r, ok := runOf(w, idlePage); ok {
		t.Errorf("a page that nobody touched: %+v", r)
	}

	from := full.open(t)
	from.WorkingSet = openFile(t, path, os.O_RDONLY)
	again, _, err := Restore(cfg, from, true, zerolog.New(zerolog.NewTestWriter(t)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeMachine(t, again) })
	<-again.ram.prefetch.done
	entries := make([]uint64, again.ram.pages())
	if err := again.ram.pagemap(again.host.pagemap, entries); err != nil {
		t.Fatal(err)
	}
	for page, want := range map[uint64]struct{ present, anonymous bool }{
		earlyPage: {true, true}, latePage: {false, false}, readPage: {false, false}, idlePage: {false, false},
	} {
		e := entries[page]
		if e&pagemapPresent != 0 != want.present || anonymous(e) != want.anonymous {
			t.Errorf("page %#x: entry %#x, want %+v", page, e, want)
		}
	}
	// What was copied ahead and not written since is no difference.
	_, saved := save(t, again, full.base)
	if saved.ElidedPages < 1 || saved.DataPages > 2 {
		t.Errorf("a diff of a machine that did nothing: %+v", saved)
	}
	if err := again.Resume(); err != nil {
		t.Fatal(err)
	}
	counts(t, again, again.peek(t, tinyCounter))
}

// A recording has what was touched, and not what lies beside it in the page cache.
func TestRecordingIsExact(t *testing.T) {
	cfg := testConfig(1, 128*mib)
	m := bootTiny(t, cfg)
	counts(t, m, 0)
	for page := range guestmem.Addr(8) {
		m.poke(t, (readPage+page)*snapshot.PageSize, 1)
	}
	full, _ := save(t, m, "")
	f := openFile(t, full.base, os.O_RDWR)
	defer f.Close()
	err := errors.Join(f.Sync(), unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
	if err != nil {
		t.Fatal(err)
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &fs); err != nil || fs.Type == unix.TMPFS_MAGIC {
		t.Skipf("needs a file system whose pages can be dropped: type %#x, %v", fs.Type, err)
	}
	from := full.open(t)
	from.Recording = true
	again, _, err := Restore(cfg, from, true, zerolog.New(zerolog.NewTestWriter(t)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeMachine(t, again) })
	again.peek(t, (readPage+3)*snapshot.PageSize)
	w := record(t, again, filepath.Join(t.TempDir(), "ws"))
	if r, ok := runOf(w, readPage+3); !ok || r.Pages != 1 {
		t.Errorf("a page that was read: %+v, %v", r, ok)
	}
}

func TestBadWorkingSetIsIgnored(t *testing.T) {
	cfg := testConfig(1, 128*mib)
	full := savedWithData(t, cfg)
	good := (&snapshot.WorkingSet{MemoryBytes: 128 * mib, Runs: []snapshot.Touched{{Page: idlePage, Pages: 1}}}).Encode()
	for name, content := range map[string][]byte{
		"empty": {}, "cut": good[:len(good)-1], "flipped": append([]byte{'t'}, good[1:]...),
		"of another memory": (&snapshot.WorkingSet{MemoryBytes: 256 * mib}).Encode(),
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "ws")
			if err := os.WriteFile(path, content, 0o600); err != nil {
				t.Fatal(err)
			}
			from := full.open(t)
			from.WorkingSet = openFile(t, path, os.O_RDONLY)
			var log strings.Builder
			m, _, err := Restore(cfg, from, false, zerolog.New(zerolog.SyncWriter(&log)))
			if err != nil {
				t.Fatal(err)
			}
			defer closeMachine(t, m)
			counts(t, m, m.peek(t, tinyCounter))
			<-m.ram.prefetch.done
			if !strings.Contains(log.String(), "working set") {
				t.Errorf("the log says nothing of it: %s", log.String())
			}
		})
	}
}

func TestReadsAreLargeAndInOrder(t *testing.T) {
	got := reads([]snapshot.Touched{
		{Page: 100, Pages: 4},
		{Page: 104, Pages: 4, Written: true},
		{Page: 111, Pages: 1},
		{Page: 4000, Pages: 2},
		{Page: 10, Pages: 1, Stage: 1},
		{Page: 4, Pages: 1, Stage: 1},
		{Page: 5, Pages: 1, Stage: 2},
	})
	want := []pageRange{{100, 12}, {4000, 2}, {10, 1}, {4, 1}, {5, 1}}
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestPreparedIsUsedOnce(t *testing.T) {
	needKVM(t)
	for _, vcpus := range []int{1, 2} { // the second does not fit: it is made anew, and what was prepared is freed
		cfg := testConfig(vcpus, 128*mib)
		prepared, err := testHost().Prepare(1)
		if err != nil {
			t.Fatal(err)
		}
		cfg.Prepared = prepared
		fd := prepared.vm
		m := bootTiny(t, cfg)
		counts(t, m, 0)
		if used := m.vm == fd; used != (vcpus == 1) || prepared.vm != nil {
			t.Errorf("%d vCPUs: used %v, left %+v", vcpus, used, prepared)
		}
	}
	if _, err := testHost().Prepare(9); err == nil {
		t.Error("nine vCPUs were prepared")
	}
	unused, err := testHost().Prepare(2)
	if err != nil {
		t.Fatal(err)
	}
	unused.Close()
	unused.Close()
}
