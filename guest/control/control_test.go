package control

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/ttrpc"
	"github.com/rs/zerolog"

	"torpor/api/apierr"
	"torpor/api/guestpb"
	"torpor/guest/env"
)

// fakeSystem records what was asked of it, in order, and what the data plane knew at that moment.
type fakeSystem struct {
	mu    sync.Mutex
	store *env.Store
	calls []string
	fail  string // the call that fails
}

func (f *fakeSystem) did(what string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, what)
	if what == f.fail {
		return errors.New("it broke")
	}
	return nil
}

func (f *fakeSystem) SetClock(time.Time) error      { return f.did("clock") }
func (f *fakeSystem) Reseed([]byte) error           { return f.did("reseed") }
func (f *fakeSystem) Mark(*env.Identity) error      { return f.did("mark") }
func (f *fakeSystem) Renew() error                  { return f.did("renew") }
func (f *fakeSystem) Sync()                         { _ = f.did("sync") }
func (f *fakeSystem) PowerOff() error               { return f.did("poweroff") }
func (f *fakeSystem) take() (calls []string)        { calls, f.calls = f.calls, nil; return calls }
func (f *fakeSystem) expect(t *testing.T, s string) { expect(t, f.take(), s) }

func expect(t *testing.T, calls []string, want string) {
	t.Helper()
	if got := strings.Join(calls, " "); got != want {
		t.Errorf("did %q, want %q", got, want)
	}
}

// dial serves a new guest on a unix socket.
func serve(t *testing.T) (guestpb.GuestService, *env.Store, *fakeSystem) {
	t.Helper()
	store, err := env.NewStore("", env.Identity{DefaultUser: DefaultUser}, env.SystemUsers{})
	if err != nil {
		t.Fatal(err)
	}
	system := &fakeSystem{store: store}
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- New(store, system, zerolog.Nop()).Serve(ctx, l) }()
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	client := ttrpc.NewClient(c)
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
		_ = client.Close()
	})
	return guestpb.NewGuestClient(client), store, system
}

func handshake(incarnation uint64, sandbox string) *guestpb.HandshakeRequest {
	return &guestpb.HandshakeRequest{
		Incarnation: incarnation, RealtimeUnixNano: time.Now().UnixNano(), Entropy: make([]byte, 64), SandboxId: sandbox,
		TemplateId: "base", AccessToken: "token-" + sandbox, EnvVars: map[string]string{"A": sandbox}, DefaultWorkdir: "/w",
	}
}

func TestHandshake(t *testing.T) {
	c, store, system := serve(t)
	req := handshake(5, "i1")
	req.RealtimeUnixNano += int64(time.Hour)
	resp, err := c.Handshake(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	system.expect(t, "clock reseed renew mark")
	boot, err := BootID()
	if err != nil || resp.GetBootId() != boot || resp.GetIncarnation() != 5 || resp.GetEnvdVersion() != env.Version || resp.GetRealtimeUnixNano() == 0 {
		t.Errorf("%v, %v", resp, err)
	}
	id := store.Get()
	if id.Incarnation != 5 || id.SandboxID != "i1" || id.AccessToken != "token-i1" || id.EnvVars["A"] != "i1" || id.DefaultUser != "user" || id.DefaultWorkdir != "/w" {
		t.Errorf("%+v", id)
	}
	// The next incarnation of the same sandbox keeps its machine id; the clock is right already.
	if _, err := c.Handshake(t.Context(), handshake(6, "i1")); err != nil {
		t.Fatal(err)
	}
	if calls := system.take(); slices.Contains(calls, "renew") || !slices.Contains(calls, "reseed") {
		t.Errorf("second incarnation did %v", calls)
	}
	// A clone is somebody else.
	if _, err := c.Handshake(t.Context(), handshake(1, "i2")); err != nil {
		t.Fatal(err)
	}
	if calls := system.take(); !slices.Contains(calls, "renew") || store.Get().AccessToken != "token-i2" {
		t.Errorf("clone did %v", calls)
	}
}

// A handshake that fails half-way must not be taken for one that was answered.
func TestFailedHandshake(t *testing.T) {
	for _, call := range []string{"clock", "reseed", "renew", "mark"} {
		c, store, system := serve(t)
		system.fail = call
		req := handshake(2, "i1")
		req.RealtimeUnixNano += int64(time.Hour)
		if _, err := c.Handshake(t.Context(), req); err == nil || !strings.Contains(err.Error(), "it broke") {
			t.Errorf("%s: %v", call, err)
		}
		if store.Get().Incarnation != 0 {
			t.Errorf("%s failed, but the incarnation was taken", call)
		}
	}
}

func TestMalformedHandshake(t *testing.T) {
	c, _, system := serve(t)
	for name, spoil := range map[string]func(*guestpb.HandshakeRequest){
		"incarnation": func(r *guestpb.HandshakeRequest) { r.Incarnation = 0 },
		"entropy":     func(r *guestpb.HandshakeRequest) { r.Entropy = make([]byte, 31) },
		"realtime":    func(r *guestpb.HandshakeRequest) { r.RealtimeUnixNano = 0 },
	} {
		req := handshake(1, "i1")
		spoil(req)
		_, err := c.Handshake(t.Context(), req)
		var told *apierr.Error
		if !errors.As(apierr.FromStatus(err), &told) || told.Code != apierr.BadRequest || !strings.Contains(told.Message, name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	system.expect(t, "")
}

func TestSyncAndShutdown(t *testing.T) {
	c, _, system := serve(t)
	if _, err := c.Sync(t.Context(), &guestpb.SyncRequest{}); err != nil {
		t.Error(err)
	}
	if _, err := c.Shutdown(t.Context(), &guestpb.ShutdownRequest{}); err != nil {
		t.Error(err)
	}
	system.expect(t, "sync poweroff")
	system.fail = "poweroff"
	if _, err := c.Shutdown(t.Context(), &guestpb.ShutdownRequest{}); err == nil {
		t.Error("a shutdown that cannot begin was answered")
	}
}

func TestMarkers(t *testing.T) {
	dir := t.TempDir()
	g := Guest{Markers: filepath.Join(dir, "run", "e2b"), MachineID: filepath.Join(dir, "machine-id")}
	id := &env.Identity{SandboxID: "i1", TemplateID: "base"}
	for range 2 {
		if err := g.Mark(id); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{".E2B_SANDBOX": "true", ".E2B_SANDBOX_ID": "i1", ".E2B_TEMPLATE_ID": "base"} {
		if got, err := os.ReadFile(filepath.Join(g.Markers, name)); string(got) != want {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	var ids []string
	for range 2 {
		if err := g.Renew(); err != nil {
			t.Fatal(err)
		}
		raw, err := os.ReadFile(g.MachineID)
		if err != nil || len(raw) != 33 {
			t.Errorf("machine id %q, %v", raw, err)
		}
		ids = append(ids, string(raw))
	}
	if ids[0] == ids[1] {
		t.Error("the machine id did not change")
	}
}
