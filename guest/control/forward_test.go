package control

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"
)

// patience bounds a test that hangs.
const patience = 60 * time.Second

// newForwarder serves a forwarder and answers a dialler to it, and what ends it.
func newForwarder(t *testing.T) (dial func() *net.UnixConn, stop func()) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() {
		served <- Forwarder{Log: zerolog.Nop()}.Serve(ctx, l)
		close(served)
	}()
	stop = func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(stop)
	return func() *net.UnixConn {
		t.Helper()
		c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		_ = c.SetDeadline(time.Now().Add(patience))
		return c
	}, stop
}

// echo serves one connection after the other: it reads to the end of the input, then answers it, in capitals.
func echo(t *testing.T, network, address string) (port int) {
	t.Helper()
	l, err := net.Listen(network, address)
	if err != nil {
		t.Skipf("listening on %s: %v", address, err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			all, _ := io.ReadAll(c)
			_, _ = c.Write(bytes.ToUpper(all))
			_ = c.Close()
		}
	}()
	return l.Addr().(*net.TCPAddr).Port
}

func TestForward(t *testing.T) {
	dial, _ := newForwarder(t)
	body := strings.Repeat("abc", 1<<20)
	for name, port := range map[string]int{"IPv4": echo(t, "tcp4", "127.0.0.1:0"), "IPv6 only": echo(t, "tcp6", "[::1]:0")} {
		c := dial()
		done := make(chan error, 1)
		go func() {
			// The first bytes come in one piece with the request line.
			if _, err := fmt.Fprintf(c, "CONNECT %d\nfirst ", port); err != nil {
				done <- err
				return
			}
			if _, err := io.WriteString(c, body); err != nil {
				done <- err
				return
			}
			done <- c.CloseWrite() // the answer comes only after the end of what is sent
		}()
		all, err := io.ReadAll(c)
		if sendErr := <-done; err != nil || sendErr != nil || string(all) != "OK\nFIRST "+strings.ToUpper(body) {
			t.Errorf("%s: %d bytes, %v, %v", name, len(all), err, sendErr)
		}
	}
}

func TestForwardRefuses(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := l.Addr().(*net.TCPAddr).Port
	_ = l.Close()
	dial, _ := newForwarder(t)
	for request, want := range map[string]string{
		fmt.Sprintf("CONNECT %d\n", closed): "ERR refused ",
		"CONNECT 0\n":                       "ERR other ",
		"CONNECT 65536\n":                   "ERR other ",
		"CONNECT x\n":                       "ERR other ",
		"GET / HTTP/1.1\r\n":                "ERR other ",
		"\n":                                "ERR other ",
		strings.Repeat("x", 100):            "",
	} {
		c := dial()
		if _, err := io.WriteString(c, request); err != nil {
			t.Fatal(err)
		}
		_ = c.CloseWrite()
		all, _ := io.ReadAll(c) // unread input may reset the connection after the answer
		if !strings.HasPrefix(string(all), want) || want == "" && len(all) > 0 || want != "" && !strings.HasSuffix(string(all), "\n") {
			t.Errorf("%q: %q", request, all)
		}
	}
}

// A broken side breaks the other: it must not look like an end.
func TestForwardBreaks(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dial, stop := newForwarder(t)
	c := dial()
	fmt.Fprintf(c, "CONNECT %d\n", l.Addr().(*net.TCPAddr).Port)
	server, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	if line, err := bufio.NewReader(c).ReadString('\n'); line != "OK\n" {
		t.Fatalf("%q, %v", line, err)
	}
	stop()
	_ = server.SetDeadline(time.Now().Add(patience))
	if _, err := server.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("the server saw %v, not a reset", err)
	}
}

func FuzzRequest(f *testing.F) {
	for _, seed := range []string{"CONNECT 80\n", "CONNECT 080\n", "CONNECT +80\n", "CONNECT 80", "CONNECT 80 \n", "connect 80\n", "CONNECT 99999\n", ""} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, line string) {
		port, err := parseRequest(line)
		if err == nil && (port == 0 || !strings.Contains(line, fmt.Sprint(port))) {
			t.Errorf("%q is port %d", line, port)
		}
	})
}
