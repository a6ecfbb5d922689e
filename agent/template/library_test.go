package template_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"torpor/agent/store"
	"torpor/agent/template"
	"torpor/agent/timing"
	"torpor/api/apierr"
	"torpor/images/imageset"
	"torpor/vmm/snapshot"
)

// bench is a library whose builds are counted and made to fail by the test.
type bench struct {
	t   *testing.T
	dir string
	cfg template.Config

	mu     sync.Mutex
	builds int
	played []string // rehearsals, by the template's digest
	forgot error    // what rehearsals fail with
	fail   error
	gate   chan struct{} // builds wait for it, if not nil
}

func newBench(t *testing.T) *bench {
	t.Helper()
	dir := t.TempDir()
	st, err := store.Open(t.Context(), filepath.Join(dir, "agent.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	budgets, err := timing.New(1)
	if err != nil {
		t.Fatal(err)
	}
	budgets.RetryMax = time.Nanosecond
	b := &bench{t: t, dir: dir}
	b.cfg = template.Config{
		Dir: filepath.Join(dir, "templates"), Images: filepath.Join(dir, "images"), VMM: filepath.Join(dir, "torpor-vmm"), VCPUs: 2,
		Build: b.build, Rehearse: b.rehearse, Store: st, Budgets: budgets, Log: zerolog.Nop(),
	}
	b.write("torpor-vmm", "one")
	b.image("base", "0.6.13")
	return b
}

func (b *bench) write(name, content string) {
	b.t.Helper()
	if err := os.WriteFile(filepath.Join(b.dir, name), []byte(content), 0o600); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) image(name, envdVersion string) {
	b.t.Helper()
	dir := filepath.Join(b.cfg.Images, name)
	if err := errors.Join(os.RemoveAll(dir), os.MkdirAll(dir, 0o700)); err != nil {
		b.t.Fatal(err)
	}
	m := imageset.Manifest{
		Name: name, Kernel: "6.1", Cmdline: "quiet", EnvdVersion: envdVersion, DiskBytes: 1 << 30,
		Vmlinux: "vmlinux", Initrd: "initrd", RootFS: "rootfs.ext4",
		Parts: map[string]string{"vmlinux": "sha256:1", "initrd": "sha256:2", "rootfs.ext4": "sha256:3", "envd": "sha256:4"},
	}
	if err := errors.Join(m.Seal(), m.Write(dir)); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) rehearse(_ context.Context, t *template.Template) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.played = append(b.played, t.Digest)
	if b.forgot != nil {
		return b.forgot
	}
	w := snapshot.WorkingSet{MemoryBytes: t.MemoryBytes}
	return os.WriteFile(t.WorkingSet(), w.Encode(), 0o600)
}

func (b *bench) rehearsals() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.played)
}

func (b *bench) build(ctx context.Context, job template.Job) error {
	b.mu.Lock()
	b.builds++
	fail, gate := b.fail, b.gate
	b.mu.Unlock()
	if gate != nil {
		select {
		case <-gate:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	for _, f := range []string{template.StateFile, template.MemoryFile, "disk.layer"} {
		if err := os.WriteFile(job.Draft.Path(f), []byte(f), 0o600); err != nil {
			return err
		}
	}
	return fail
}

func (b *bench) count() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.builds
}

func (b *bench) set(fail error, gate chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.fail, b.gate = fail, gate
}

func (b *bench) open() *template.Library {
	b.t.Helper()
	l, err := template.Open(context.Background(), b.cfg)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(l.Close)
	return l
}

func (b *bench) get(l *template.Library) *template.Template {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	t, err := l.Get(ctx, "base")
	if err != nil {
		b.t.Fatal(err)
	}
	return t
}

func TestATemplateIsBuiltOnceAndFoundAgain(t *testing.T) {
	b := newBench(t)
	l := b.open()
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() { b.get(l) })
	}
	wg.Wait()
	first := b.get(l)
	l.Close()
	second := b.get(b.open())
	if b.count() != 1 || first.Digest != second.Digest {
		t.Errorf("%d builds, digests %s and %s", b.count(), first.Digest, second.Digest)
	}
	if second.VCPUs != 2 || second.MemoryBytes != 512<<20 || second.EnvdVersion != "0.6.13" || !strings.HasSuffix(second.RootFS, "base/rootfs.ext4") {
		t.Errorf("template %+v", second)
	}
}

func TestAStartIsRehearsedOnce(t *testing.T) {
	b := newBench(t)
	b.forgot = errors.New("it forgot its lines")
	first := b.get(b.open())
	if _, err := os.Stat(first.WorkingSet()); b.rehearsals() != 1 || !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%d rehearsals that failed, %v", b.rehearsals(), err)
	}
	b.forgot = nil
	for range 2 {
		b.get(b.open())
	}
	if b.rehearsals() != 2 || b.count() != 1 {
		t.Errorf("%d rehearsals, %d builds", b.rehearsals(), b.count())
	}
	if err := os.WriteFile(first.WorkingSet(), []byte("damaged"), 0o600); err != nil {
		t.Fatal(err)
	}
	b.get(b.open())
	if b.rehearsals() != 3 || b.count() != 1 {
		t.Errorf("with a damaged working set: %d rehearsals, %d builds", b.rehearsals(), b.count())
	}
}

func TestVCPUs(t *testing.T) {
	for processors, want := range map[int]uint32{0: 1, 1: 1, 2: 2, 64: 2} {
		if got := template.VCPUs(processors); got != want {
			t.Errorf("%d processors: %d vCPUs, want %d", processors, got, want)
		}
	}
}

func TestAnotherImageOrVMMOrShapeIsAnotherTemplate(t *testing.T) {
	b := newBench(t)
	first := b.get(b.open())
	b.write("torpor-vmm", "two")
	second := b.get(b.open())
	b.image("base", "0.6.14")
	third := b.get(b.open())
	b.cfg.VCPUs = 1
	fourth := b.get(b.open())
	if first.Digest == second.Digest || second.Digest == third.Digest || third.Digest == fourth.Digest || b.count() != 4 {
		t.Errorf("digests %s %s %s %s after %d builds", first.Digest, second.Digest, third.Digest, fourth.Digest, b.count())
	}
}

func TestDamagedTemplateIsBuiltAnew(t *testing.T) {
	b := newBench(t)
	first := b.get(b.open())
	if err := os.WriteFile(first.Snapshot.Path(template.MemoryFile), []byte("men"), 0o600); err != nil {
		t.Fatal(err)
	}
	b.get(b.open())
	if b.count() != 2 {
		t.Errorf("%d builds", b.count())
	}
}

func TestFailedBuildIsToldAndTriedAgain(t *testing.T) {
	b := newBench(t)
	b.set(errors.New("no kernel"), nil)
	l := b.open()
	_, err := l.Get(t.Context(), "base")
	if !errors.Is(err, &apierr.Error{Code: apierr.NotReady}) || !strings.Contains(err.Error(), "no kernel") {
		t.Errorf("got %v", err)
	}
	if s := l.List(); len(s) != 1 || s[0].State != "failed" || !strings.Contains(s[0].Error, "no kernel") {
		t.Errorf("list %+v", s)
	}
	rows, err := b.cfg.Store.Templates(t.Context())
	if err != nil || len(rows) != 1 || rows[0].State != "failed" {
		t.Errorf("recorded %+v, %v", rows, err)
	}
	if left, _ := filepath.Glob(filepath.Join(b.cfg.Dir, "*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	b.set(nil, nil)
	b.get(l)
	if s := l.List(); s[0].State != "ready" || s[0].Error != "" {
		t.Errorf("list %+v", s)
	}
}

func TestGetDoesNotWaitPastItsBudgetAndUnknownIsNotFound(t *testing.T) {
	b := newBench(t)
	b.set(nil, make(chan struct{}))
	l := b.open()
	l.Build(nil)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := l.Get(ctx, "base"); !errors.Is(err, &apierr.Error{Code: apierr.NotReady}) {
		t.Errorf("got %v", err)
	}
	if _, err := l.Get(t.Context(), "other"); !errors.Is(err, &apierr.Error{Code: apierr.NotFound}) {
		t.Errorf("got %v", err)
	}
	if s := l.List(); s[0].State != "building" {
		t.Errorf("list %+v", s)
	}
}

func TestAnOldTemplateStaysForItsSandboxesOnly(t *testing.T) {
	b := newBench(t)
	first := b.get(b.open())
	b.write("torpor-vmm", "two")
	l := b.open()
	l.Build([]string{first.Digest})
	second := b.get(l)
	old, err := l.ByDigest(t.Context(), first.Digest)
	if err != nil || old.Digest != first.Digest {
		t.Errorf("the old one: %v", err)
	}
	if now, err := l.ByDigest(t.Context(), second.Digest); err != nil || now.Digest != second.Digest {
		t.Errorf("the new one: %v", err)
	}
	l.Close()

	l = b.open()
	l.Build(nil)
	b.get(l)
	l.Close()
	l = b.open()
	if _, err := l.ByDigest(t.Context(), first.Digest); !errors.Is(err, &apierr.Error{Code: apierr.SandboxBroken}) {
		t.Errorf("nobody needed it, and still: %v", err)
	}
}

// A template that is built anew after the same recipe has other pages in memory: what a sandbox saved over the old ones is not to be
// laid over it.
func TestASandboxIsNotRestoredOverATemplateThatWasBuiltAnew(t *testing.T) {
	b := newBench(t)
	l := b.open()
	first := b.get(l)
	l.Close()
	l = b.open()
	if again := b.get(l); again.Digest != first.Digest {
		t.Fatalf("found again as %s, built as %s", again.Digest, first.Digest)
	}
	l.Close()
	if err := os.Truncate(first.Snapshot.Path(template.MemoryFile), 1); err != nil {
		t.Fatal(err)
	}
	l = b.open()
	l.Build([]string{first.Digest})
	second := b.get(l)
	if _, err := l.ByDigest(t.Context(), first.Digest); !errors.Is(err, &apierr.Error{Code: apierr.SandboxBroken}) {
		t.Errorf("what was saved over %s is restored over %s: %v", first.Digest, second.Digest, err)
	}
	if now, err := l.ByDigest(t.Context(), second.Digest); err != nil || now != second {
		t.Errorf("the new one: %v", err)
	}
}

func TestASandboxIsNotRestoredOverAnotherImage(t *testing.T) {
	b := newBench(t)
	first := b.get(b.open())
	b.image("base", "0.6.14")
	_, err := b.open().ByDigest(t.Context(), first.Digest)
	if !errors.Is(err, &apierr.Error{Code: apierr.SandboxBroken}) || !strings.Contains(err.Error(), "not installed") {
		t.Errorf("got %v", err)
	}
}

func TestNoImageIsASentence(t *testing.T) {
	b := newBench(t)
	if err := os.RemoveAll(filepath.Join(b.cfg.Images, "base")); err != nil {
		t.Fatal(err)
	}
	if _, err := template.Open(t.Context(), b.cfg); err == nil || !strings.Contains(err.Error(), "torpor-images") {
		t.Errorf("got %v", err)
	}
}
