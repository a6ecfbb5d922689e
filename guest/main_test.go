package main

import (
	"context"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rs/zerolog"
)

func TestDeveloperMode(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	listening := make(chan struct{}, 1)
	log := zerolog.New(writer(func(p []byte) {
		if strings.Contains(string(p), "developer mode") {
			listening <- struct{}{}
		}
	}))
	go func() { ended <- run(ctx, options{listen: "unix:" + path, user: "root", token: "t"}, log) }()
	<-listening
	client := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", path)
	}}}
	for url, want := range map[string]int{"http://envd/health": 204, "http://envd/envs": 401} {
		resp, err := client.Get(url)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != want || resp.Header.Get("Torpor-Incarnation") != "0" {
			t.Errorf("%s: %s", url, resp.Status)
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

type writer func([]byte)

func (w writer) Write(p []byte) (int, error) {
	w(p)
	return len(p), nil
}

func TestRefusedOptions(t *testing.T) {
	for _, o := range []options{{}, {listen: "udp:127.0.0.1:1"}, {listen: "nonsense"}, {listen: "unix:/no/such/dir/s"}} {
		if err := run(t.Context(), o, zerolog.Nop()); err == nil {
			t.Errorf("%+v was accepted", o)
		}
	}
}
