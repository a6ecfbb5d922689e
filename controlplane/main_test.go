package main

import (
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"torpor/controlplane/fakeagent"
)

func TestConfigFaultsAreNamedTogether(t *testing.T) {
	_, err := parseConfig([]string{"--listen", "3000", "--domain", "https://x", "--max-timeout", "0s", "--data", ""}, io.Discard)
	for _, want := range []string{"--listen", "--domain", "--max-timeout", "--data"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not name %s", err, want)
		}
	}
	for _, args := range [][]string{{"extra"}, {"--nope"}, {"--patience", "-1s"}} {
		if _, err := parseConfig(args, io.Discard); err == nil {
			t.Errorf("%v was taken", args)
		}
	}
	if cfg, err := parseConfig(nil, io.Discard); err != nil || cfg.Listen != "127.0.0.1:3000" {
		t.Errorf("defaults: %+v %v", cfg, err)
	}
}

func testConfig(t *testing.T) config {
	t.Helper()
	agent := fakeagent.Start(t)
	dir := t.TempDir()
	return config{
		Data: filepath.Join(dir, "data"), Agent: agent.Socket, Gateway: filepath.Join(dir, "g.sock"), Listen: freePort(t),
		MaxTimeout: time.Hour, Patience: time.Second,
	}
}

func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func TestStartupErrorsAreOneSentence(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	notADir := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(notADir, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		change func(*config)
		want   string
	}{
		"port in use":          {func(c *config) { c.Listen = taken.Addr().String() }, "is in use by another process: stop that one, or choose another address with --listen"},
		"address of elsewhere": {func(c *config) { c.Listen = "192.0.2.1:3000" }, "choose another address with --listen"},
		"no address":           {func(c *config) { c.Listen = "256.1.1.1:1" }, "choose another address with --listen"},
		"data is a file":       {func(c *config) { c.Data = notADir }, "choose another with --data"},
		"full disk":            {func(c *config) { c.Data = "/dev/full/x" }, "--data"},
	} {
		cfg := testConfig(t)
		c.change(&cfg)
		err := run(t.Context(), cfg, zerolog.Nop())
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestServesUntilToldToStop(t *testing.T) {
	cfg := testConfig(t)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx, cfg, zerolog.Nop()) }()
	res := awaitHealth(t, "http://"+cfg.Listen)
	if res != http.StatusOK {
		t.Errorf("health: %d", res)
	}
	if info, err := os.Stat(filepath.Join(cfg.Data, "api-key")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("key file: %v %v", info, err)
	}
	stop()
	if err := <-ended; err != nil {
		t.Errorf("a stop is no error: %v", err)
	}
	if _, err := http.Get("http://" + cfg.Listen + "/v1/health"); err == nil {
		t.Error("still serving")
	}
}

func awaitHealth(t *testing.T, url string) int {
	t.Helper()
	for {
		res, err := http.Get(url + "/v1/health")
		if err == nil {
			res.Body.Close()
			return res.StatusCode
		}
		select {
		case <-t.Context().Done():
			t.Fatal(err)
		case <-time.After(10 * time.Millisecond):
		}
	}
}
