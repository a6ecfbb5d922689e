package main

import (
	"bytes"
	"errors"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"torpor/tools/hostvm/wire"
)

const token = "secret"

// dial starts an exec server for one connection, reads its greeting and answers the client's end.
func dial(t *testing.T) net.Conn {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var served sync.WaitGroup
	served.Go(func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		_ = serveConn(c, token, func(time.Time) {})
	})
	conn, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		conn.Close()
		served.Wait()
	})
	if f, err := wire.Read(conn); err != nil || f.Type != wire.Alive {
		t.Fatalf("greeting: %c, %v", f.Type, err)
	}
	return conn
}

func start(t *testing.T, shell string) net.Conn {
	t.Helper()
	conn := dial(t)
	if err := wire.WriteJSON(conn, wire.Start, wire.Command{Token: token, Shell: shell, Now: time.Now().UnixNano()}); err != nil {
		t.Fatal(err)
	}
	return conn
}

// collect reads frames until Exit.
func collect(t *testing.T, conn net.Conn) (stdout, stderr string, res wire.Result) {
	t.Helper()
	var out, errs bytes.Buffer
	for {
		f, err := wire.Read(conn)
		if err != nil {
			t.Fatalf("after %q, %q: %v", out.String(), errs.String(), err)
		}
		switch f.Type {
		case wire.Stdout:
			out.Write(f.Payload)
		case wire.Stderr:
			errs.Write(f.Payload)
		case wire.Exit:
			if err := f.Decode(&res); err != nil {
				t.Fatal(err)
			}
			return out.String(), errs.String(), res
		}
	}
}

func TestCommandsEndAsTheyEnded(t *testing.T) {
	for _, c := range []struct {
		shell, stdout, stderr string
		code                  int
	}{
		{"true", "", "", 0},
		{"exit 7", "", "", 7},
		{"kill -9 $$", "", "", 137},
		{"echo out; echo err >&2; exit 3", "out\n", "err\n", 3},
		{"sleep 60 & echo background", "background\n", "", 0},
		{"echo -n $A", "", "", 0},
		{"head -c 300000 /dev/zero | tr '\\0' x", strings.Repeat("x", 300000), "", 0},
	} {
		t.Run(c.shell, func(t *testing.T) {
			t.Parallel()
			stdout, stderr, res := collect(t, start(t, c.shell))
			if stdout != c.stdout || stderr != c.stderr || res.Code != c.code || res.Error != "" {
				t.Fatalf("got %d bytes, %q, %+v", len(stdout), stderr, res)
			}
		})
	}
}

func TestInputReachesTheCommand(t *testing.T) {
	conn := start(t, "cat; echo end")
	for _, p := range []string{"one ", "two\n", ""} {
		if err := wire.Write(conn, wire.Stdin, []byte(p)); err != nil {
			t.Fatal(err)
		}
	}
	if stdout, _, _ := collect(t, conn); stdout != "one two\nend\n" {
		t.Fatalf("got %q", stdout)
	}
}

// Output of a quick command was lost when the machine was so busy that the deadline on the pipe had passed before the
// first read of it; and an answer was lost to a reset when input of the client's was still unread.
func TestNothingIsLostWhenManyRunAtOnce(t *testing.T) {
	var all sync.WaitGroup
	for i := range 100 {
		conn := start(t, "echo "+strconv.Itoa(i))
		all.Go(func() {
			_ = wire.Write(conn, wire.Stdin, bytes.Repeat([]byte("x"), 1000))
			if stdout, _, res := collect(t, conn); stdout != strconv.Itoa(i)+"\n" || res.Code != 0 {
				t.Errorf("%d answered %q, %+v", i, stdout, res)
			}
		})
	}
	all.Wait()
}

func TestClientGoneKillsTheCommand(t *testing.T) {
	for name, shell := range map[string]string{"at rest": "echo $$; sleep 600", "and reads no input": "echo $$; exec sleep 600"} {
		t.Run(name, func(t *testing.T) {
			conn := start(t, shell)
			f, err := wire.Read(conn)
			if err != nil {
				t.Fatal(err)
			}
			pid, err := strconv.Atoi(strings.TrimSpace(string(f.Payload)))
			if err != nil {
				t.Fatal(err)
			}
			if name != "at rest" { // more than the pipe holds, so that the server is stuck writing it
				go func() {
					for wire.Write(conn, wire.Stdin, make([]byte, wire.MaxPayload)) == nil {
					}
				}()
			}
			conn.Close()
			for !errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
				select {
				case <-t.Context().Done():
					t.Fatal("the command lives on")
				case <-time.After(10 * time.Millisecond):
				}
			}
		})
	}
}

func TestStrangersGetNoCommand(t *testing.T) {
	for name, first := range map[string][]byte{
		"wrong token":      frame(t, wire.Start, wire.Command{Token: "guess", Shell: "echo run"}),
		"no token":         frame(t, wire.Start, wire.Command{Shell: "echo run"}),
		"not a start":      frame(t, wire.Stdin, "x"),
		"not the protocol": []byte("GET / HTTP/1.1\r\n\r\n"),
	} {
		conn := dial(t)
		if _, err := conn.Write(first); err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(conn); len(got) > 0 {
			t.Errorf("%s: answered %q, %v", name, got, err)
		}
	}
}

func frame(t *testing.T, typ wire.Type, v any) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := wire.WriteJSON(&b, typ, v); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}
