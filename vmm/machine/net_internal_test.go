package machine

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"torpor/tools/hosttest"
	"torpor/vmm/snapshot"
	"torpor/vmm/virtio"
)

const (
	hostAddr  = "10.9.0.1"
	guestAddr = "10.9.0.2"
)

func testNet(t *testing.T, ns *hosttest.NetNS, tap string) Net {
	t.Helper()
	return Net{ID: tap, Tap: ns.Tap(t, tap, hostAddr+"/24", hosttest.TapFlags), MAC: [6]byte{2, 0, 0, 0, 0, 2}}
}

// Network cards are in a snapshot, and a machine with more, fewer or other ones cannot take it.
func TestNetIsPartOfASnapshot(t *testing.T) {
	needKVM(t)
	ns := hosttest.NewNetNS(t)
	cfg := testConfig(1, 128*mib)
	without, _ := save(t, bootTiny(t, cfg), "")
	cfg.Net = []Net{testNet(t, ns, "tap0")}
	with, _ := save(t, bootTiny(t, cfg), "")

	cfg.Net = []Net{testNet(t, ns, "tap1")}
	r := restoreTiny(t, cfg, with)
	if s := r.Status(); len(s.Nets) != 1 {
		t.Errorf("%d network cards", len(s.Nets))
	}
	cfg.Net = []Net{testNet(t, ns, "tap2")}
	if _, _, err := Restore(cfg, without.open(t), true, zerolog.Nop()); !errors.Is(err, snapshot.ErrMismatch) {
		t.Errorf("restore with one more: %v", err)
	}
	cfg.Net = nil
	if _, _, err := Restore(cfg, with.open(t), true, zerolog.Nop()); !errors.Is(err, snapshot.ErrMismatch) {
		t.Errorf("restore without: %v", err)
	}
}

func TestBadNetsAreRefused(t *testing.T) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	good := Net{ID: "a", Tap: null, MAC: [6]byte{2, 0, 0, 0, 0, 1}}
	for name, change := range map[string]func(*Config){
		"no tap":            func(c *Config) { c.Net[0].Tap = nil },
		"no address":        func(c *Config) { c.Net[0].MAC = [6]byte{} },
		"a group's address": func(c *Config) { c.Net[0].MAC[0] = 3 },
		"too many":          func(c *Config) { c.Net = append(c.Net, good, good, good, good) },
	} {
		cfg := testConfig(1, 128*mib)
		cfg.Net = []Net{good}
		if err := cfg.validate(); err != nil {
			t.Fatal(err)
		}
		change(&cfg)
		if err := cfg.validate(); !errors.Is(err, ErrConfig) {
			t.Errorf("%s: %v", name, err)
		}
	}
	needKVM(t)
	cfg := testConfig(1, 128*mib)
	cfg.Net = []Net{good} // a file, but no tap
	if _, err := Boot(cfg, Kernel{Image: openFile(t, kernelOf(t, tinyCode), os.O_RDONLY)}, zerolog.Nop()); !errors.Is(err, ErrConfig) || !errors.Is(err, virtio.ErrTap) {
		t.Errorf("no tap: %v", err)
	}
}

// Programs of the guest. Each prints the digest of the bytes that went over its connection.
const (
	sendScript = `python3 -c "
import socket, os, hashlib
data = os.urandom(%d)
s = socket.create_connection(('%s', %d))
s.sendall(data)
s.shutdown(socket.SHUT_WR)
s.recv(1)
print(hashlib.sha256(data).hexdigest())"`
	receiveScript = `python3 -c "
import socket, hashlib
data = bytearray(%d)
view = memoryview(data)
s = socket.create_connection(('%s', %d))
at = 0
while at < len(data):
    n = s.recv_into(view[at:])
    if n == 0: break
    at += n
s.sendall(b'x')
print(hashlib.sha256(view[:at]).hexdigest())"`
)

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// accept takes one connection of the guest.
func accept(t *testing.T, l *net.TCPListener) net.Conn {
	t.Helper()
	_ = l.SetDeadline(time.Now().Add(guestTimeout))
	c, err := l.Accept()
	if err != nil {
		t.Fatalf("the guest does not connect: %v", err)
	}
	_ = c.SetDeadline(time.Now().Add(guestTimeout))
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// bulk sends n bytes each way, checks that they arrive as they are, and that they went in frames longer than the wire's.
func (g *guest) bulk(t *testing.T, l *net.TCPListener, n int) {
	t.Helper()
	port := l.Addr().(*net.TCPAddr).Port
	before := g.Status().Nets[0]
	type result struct {
		digest string
		took   time.Duration
		err    error
	}
	host := func(f func(net.Conn) (string, error)) <-chan result {
		done := make(chan result, 1)
		go func() {
			c, err := l.Accept()
			if err != nil {
				done <- result{err: err}
				return
			}
			defer func() { _ = c.Close() }()
			start := time.Now()
			d, err := f(c)
			done <- result{d, time.Since(start), err}
		}()
		return done
	}
	_ = l.SetDeadline(time.Now().Add(guestTimeout))
	report := func(way, said string, r result) {
		t.Helper()
		if r.err != nil || r.digest != said {
			t.Fatalf("%s: the guest has %s, the host %s, %v", way, said, r.digest, r.err)
		}
		t.Logf("%s: %d MiB in %v, %.1f MB/s", way, n>>20, r.took.Round(time.Millisecond), float64(n)/1e6/r.took.Seconds())
	}

	done := host(func(c net.Conn) (string, error) {
		b, err := io.ReadAll(c)
		if err == nil {
			_, err = c.Write([]byte("x"))
		}
		return digest(b), err
	})
	report("guest to host", g.sh(t, "set -e; "+fmt.Sprintf(sendScript, n, hostAddr, port)), <-done)

	data := make([]byte, n)
	_, _ = rand.Read(data) // never fails
	done = host(func(c net.Conn) (string, error) {
		if _, err := c.Write(data); err != nil {
			return "", err
		}
		_, err := c.Read(make([]byte, 1))
		return digest(data), err
	})
	report("host to guest", g.sh(t, "set -e; "+fmt.Sprintf(receiveScript, n, hostAddr, port)), <-done)

	const ethernet = 1514
	after := g.Status().Nets[0]
	for way, mean := range map[string]uint64{
		"to the guest":   (after.RXBytes - before.RXBytes) / (after.RXFrames - before.RXFrames),
		"from the guest": (after.TXBytes - before.TXBytes) / (after.TXFrames - before.TXFrames),
	} {
		// Half of the frames are acknowledgements, so this takes long ones indeed.
		if t.Logf("frames %s: %d bytes on average", way, mean); mean < ethernet {
			t.Errorf("frames %s are segmented", way)
		}
	}
	t.Logf("%+v", after)
}

// TCP both ways at full length, and again after a restore onto another tap: a connection that was open, and new ones.
func TestRealGuestNetwork(t *testing.T) {
	i := needImage(t)
	const bulk = 16 * mib
	ns := hosttest.NewNetNS(t)
	g := bootGuest(t, i, 1, testNet(t, ns, "tap0"))
	g.health(t)
	if got := g.sh(t, "set -e; ip addr add "+guestAddr+"/24 dev eth0; ip link set eth0 up; cat /sys/class/net/eth0/address"); got != "02:00:00:00:00:02" {
		t.Errorf("the guest's card has the address %q", got)
	}
	l := ns.Listen(t, hostAddr+":0")
	g.bulk(t, l, bulk)

	g.sh(t, "set -e; "+fmt.Sprintf(receiveScript, bulk, hostAddr, l.Addr().(*net.TCPAddr).Port)+" >/tmp/digest 2>&1 </dev/null &")
	open := accept(t, l)
	data := make([]byte, bulk)
	_, _ = rand.Read(data) // never fails
	if _, err := open.Write(data[:bulk/2]); err != nil {
		t.Fatal(err)
	}

	full, _ := timedSave(t, g, "")
	ns.Delete(t, "tap0")
	g2 := restoreGuest(t, i, g, full, testNet(t, ns, "tap1"))
	g2.health(t)
	if _, err := open.Write(data[bulk/2:]); err != nil {
		t.Fatal(err)
	}
	if _, err := open.Read(make([]byte, 1)); err != nil {
		t.Fatalf("on a connection from before the restore: %v", err)
	}
	got := g2.sh(t, "set -e; while ! grep -q . /tmp/digest; do sleep 0.1; done; cat /tmp/digest")
	if got != digest(data) {
		t.Errorf("over a connection from before the restore the guest got %s, want %s", got, digest(data))
	}
	g2.bulk(t, l, bulk)
	g2.clean(t)
}
