package machine

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"
)

// echoScript is a server in the guest that sends back whatever comes on any number of connections to a vsock port.
const echoScript = `cat >/tmp/echo.py <<'END'
import resource, select, socket
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
server = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
server.bind((socket.VMADDR_CID_ANY, 5005))
server.listen(2000)
poller = select.epoll()
poller.register(server, select.EPOLLIN)
conns = {}
while True:
    for fd, _ in poller.poll():
        if fd == server.fileno():
            c, _ = server.accept()
            conns[c.fileno()] = c
            poller.register(c, select.EPOLLIN)
            continue
        data = conns[fd].recv(65536)
        if data:
            conns[fd].sendall(data)
            continue
        poller.unregister(fd)
        conns.pop(fd).close()
END
python3 /tmp/echo.py >/tmp/echo.log 2>&1 </dev/null &`

const echoPort = 5005

// count returns how many entries a directory of this process has: descriptors, threads.
func count(t *testing.T, dir string) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/" + dir)
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// As many connections as there may be at once, with bytes going both ways on all of them; one more is refused and harms none;
// and when they are gone nothing is left of them.
func TestRealGuestThousandConnections(t *testing.T) {
	const (
		least = 1000
		each  = 24 << 10
	)
	i := needImage(t)
	g := bootGuest(t, i, 1)
	g.health(t)
	g.sh(t, echoScript)
	ctx, cancel := context.WithTimeout(t.Context(), 2*guestTimeout)
	defer cancel()
	g.within(t, "listening", func() bool {
		c, err := g.dial(ctx, echoPort)
		if err != nil {
			return false
		}
		_ = c.Close()
		return true
	})
	fds, threads := count(t, "fd"), count(t, "task")

	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			_ = c.Close()
		}
	}()
	start := time.Now()
	for {
		c, err := g.dial(ctx, echoPort)
		if err != nil {
			t.Logf("connection %d: %v", len(conns)+1, err)
			break
		}
		conns = append(conns, c)
	}
	t.Logf("%d connections in %v", len(conns), time.Since(start).Round(time.Millisecond))
	if len(conns) < least || ctx.Err() != nil {
		t.Fatalf("%d connections, want %d", len(conns), least)
	}

	start = time.Now()
	errs := make([]error, len(conns))
	var all sync.WaitGroup
	for i, c := range conns {
		_ = c.SetDeadline(time.Now().Add(2 * guestTimeout))
		all.Go(func() { errs[i] = echoed(c, each) })
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d KiB there and back on each in %v", each>>10, time.Since(start).Round(time.Millisecond))
	if now := count(t, "task"); now > threads+20 {
		t.Errorf("%d threads with %d connections, %d before", now, len(conns), threads)
	}
	if _, err := g.dial(ctx, echoPort); err == nil || ctx.Err() != nil {
		t.Errorf("one connection more: %v", err)
	}

	for _, c := range conns {
		_ = c.Close()
	}
	conns = nil
	g.within(t, "closing all", func() bool { return count(t, "fd") <= fds })
	if now := count(t, "task"); now > threads+20 {
		t.Errorf("%d threads afterwards, %d before", now, threads)
	}
	g.health(t)
	g.clean(t)
}

// echoed sends n random bytes and reports whether they came back.
func echoed(c net.Conn, n int) error {
	data, back := make([]byte, n), make([]byte, n)
	_, _ = rand.Read(data) // never fails
	sent := make(chan error, 1)
	go func() { _, err := c.Write(data); sent <- err }()
	_, err := io.ReadFull(c, back)
	if err == nil && !bytes.Equal(data, back) {
		err = errors.New("what came back is not what was sent")
	}
	return errors.Join(err, <-sent)
}
