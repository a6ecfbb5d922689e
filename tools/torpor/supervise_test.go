package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"
)

// script makes a daemon of a shell script; dir is $1.
func script(t *testing.T, dir, name, text string) daemon {
	t.Helper()
	path := filepath.Join(dir, name+".sh")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return daemon{name: name, path: "/bin/sh", args: []string{path, dir}, log: filepath.Join(dir, "log", name+".log")}
}

func testSupervisor() *supervisor {
	return &supervisor{log: zerolog.Nop(), delays: []time.Duration{time.Millisecond}, grace: 10 * time.Second}
}

func TestDaemonThatCannotStartIsSaidAndNotRepeated(t *testing.T) {
	dir := t.TempDir()
	bad := script(t, dir, "agent", `echo run >> "$1/runs"; echo '{"level":"error","error":"the disk is full","message":"cannot start"}' >&2; exit 1`)
	good := script(t, dir, "controlplane", `exec sleep 600`)
	err := testSupervisor().run(t.Context(), []daemon{bad, good}, func(ctx context.Context) error {
		<-ctx.Done()
		return context.Cause(ctx)
	})
	if err == nil || err.Error() != "the agent stopped: cannot start: the disk is full" {
		t.Errorf("got %v", err)
	}
	if runs, _ := os.ReadFile(filepath.Join(dir, "runs")); string(runs) != "run\n" {
		t.Errorf("it was started %d times", strings.Count(string(runs), "\n"))
	}
}

func TestDaemonThatDiesIsStartedAgain(t *testing.T) {
	dir := t.TempDir()
	// The first life waits until the host is up and ends badly; the second makes the test's ctx end.
	d := script(t, dir, "agent", `
if [ -e "$1/lived" ]; then : > "$1/again"; exec sleep 600; fi
: > "$1/lived"
while [ ! -e "$1/up" ]; do sleep 0.01; done
kill -9 $$`)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err := testSupervisor().run(ctx, []daemon{d}, func(ctx context.Context) error {
		go func() {
			os.WriteFile(filepath.Join(dir, "up"), nil, 0o600)
			_ = retry(ctx, func() (bool, error) {
				_, err := os.Stat(filepath.Join(dir, "again"))
				return err == nil, err
			})
			cancel()
		}()
		return nil
	})
	if err != nil || errors.Is(ctx.Err(), context.DeadlineExceeded) {
		t.Errorf("run: %v, ctx: %v", err, ctx.Err())
	}
}

func TestStopIsInReverseOrderAndByTerm(t *testing.T) {
	dir := t.TempDir()
	text := `trap 'echo %s >> "$1/stopped"; exit 0' TERM; : > "$1/%s.on"; while :; do sleep 0.01; done`
	daemons := []daemon{script(t, dir, "first", fmt.Sprintf(text, "first", "first")), script(t, dir, "second", fmt.Sprintf(text, "second", "second"))}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err := testSupervisor().run(ctx, daemons, func(ctx context.Context) error {
		defer cancel()
		return retry(ctx, func() (bool, error) {
			_, err1 := os.Stat(filepath.Join(dir, "first.on"))
			_, err2 := os.Stat(filepath.Join(dir, "second.on"))
			return err1 == nil && err2 == nil, errors.Join(err1, err2)
		})
	})
	stopped, _ := os.ReadFile(filepath.Join(dir, "stopped"))
	if err != nil || string(stopped) != "second\nfirst\n" {
		t.Errorf("run: %v, stopped: %q", err, stopped)
	}
}

func TestStubbornDaemonIsKilledAfterTheGrace(t *testing.T) {
	dir := t.TempDir()
	d := script(t, dir, "agent", `trap '' TERM; : > "$1/on"; while :; do sleep 0.01; done`)
	s := testSupervisor()
	s.grace = 20 * time.Millisecond
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err := s.run(ctx, []daemon{d}, func(ctx context.Context) error {
		defer cancel()
		return retry(ctx, func() (bool, error) { _, err := os.Stat(filepath.Join(dir, "on")); return err == nil, err })
	})
	if err != nil || errors.Is(ctx.Err(), context.DeadlineExceeded) {
		t.Errorf("run: %v, ctx: %v", err, ctx.Err())
	}
}

func TestLockTellsTheHolder(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run", "up.lock")
	if pid, err := holder(path); pid != 0 || err != nil {
		t.Errorf("before: %d %v", pid, err)
	}
	l, err := takeLock(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := takeLock(path); !errors.Is(err, errLocked) {
		t.Errorf("second taker: %v", err)
	}
	if pid, err := holder(path); pid != os.Getpid() || err != nil {
		t.Errorf("held: %d %v", pid, err)
	}
	released := make(chan error, 1)
	go func() { released <- awaitRelease(t.Context(), path) }()
	l.release()
	if err := <-released; err != nil {
		t.Error(err)
	}
	if pid, err := holder(path); pid != 0 || err != nil {
		t.Errorf("after: %d %v", pid, err)
	}
}

// Who looks at the lock, or waits for it, keeps nobody from taking it and is never taken for its holder.
func TestWatchersOfTheLockAreInNobodysWay(t *testing.T) {
	path := filepath.Join(t.TempDir(), "up.lock")
	for range 200 {
		l, err := takeLock(path)
		if err != nil {
			t.Fatal(err)
		}
		var watchers sync.WaitGroup
		for range 4 {
			watchers.Go(func() {
				if err := awaitRelease(t.Context(), path); err != nil {
					t.Error(err)
				}
				if pid, err := holder(path); err != nil || pid != 0 && pid != os.Getpid() {
					t.Errorf("holder: %d %v", pid, err)
				}
			})
		}
		l.release()
		if l, err = takeLock(path); err != nil {
			t.Fatal("take after release:", err)
		}
		l.release()
		watchers.Wait()
		if pid, err := holder(path); pid != 0 || err != nil {
			t.Fatalf("after: %d %v", pid, err)
		}
	}
}

func TestAwaitReleaseIsBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "up.lock")
	l, err := takeLock(path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.release()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := awaitRelease(ctx, path); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestPreflight(t *testing.T) {
	dir := t.TempDir()
	if err := kvmUsable(filepath.Join(dir, "kvm")); err == nil || !strings.Contains(err.Error(), "is missing") {
		t.Errorf("kvm: %v", err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := portFree(l.Addr().String()); err == nil || !strings.Contains(err.Error(), "port in use") {
		t.Errorf("port: %v", err)
	}
	if free, err := freeBytes(dir); err != nil || free < 0 {
		t.Errorf("free: %d %v", free, err)
	}
}

func TestPlainLine(t *testing.T) {
	for in, want := range map[string]string{
		"plain words":                      "plain words",
		`{"message":"m","error":"e"}`:      "m: e",
		`{"message":"m"}`:                  "m",
		`{"error":"e"}`:                    "e",
		`{"cut`:                            `{"cut`,
		"":                                 "",
		`torpor-agent: /dev/kvm is absent`: "torpor-agent: /dev/kvm is absent",
	} {
		if got := plainLine([]byte(in)); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}
