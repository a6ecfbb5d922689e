package machine

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/ttrpc"
	"github.com/rs/zerolog"

	"torpor/api/guestpb"
	"torpor/vmm/cow"
)

// The tests of this file boot the real guest: Debian's kernel and envd. They run where an image set and a KVM that can run a
// kernel are, which is in the emulated host and on hardware; elsewhere they are skipped.
var (
	imageDir = flag.String("image", "/var/lib/torpor/images/base", "image set with vmlinux, initrd, rootfs.ext4 and image.json")
	cycles   = flag.Int("cycles", 5, "pause and restore cycles of the chain test")
	cmdline  = flag.String("cmdline", "", "added to the kernel command line")
)

const (
	guestTimeout  = 3 * time.Minute // for a cold boot on an emulated host
	healthPort    = 49983
	guestRPCPort  = 1024
	hostHelloPort = 1024
)

// image is an image set.
type image struct {
	Cmdline, Vmlinux, Initrd, Rootfs string
	DiskBytes                        int64
}

func needImage(t *testing.T) image {
	t.Helper()
	needKVM(t)
	raw, err := os.ReadFile(filepath.Join(*imageDir, "image.json"))
	if err != nil {
		t.Skipf("needs an image set (-image DIR): %v", err)
	}
	var i image
	if err := json.Unmarshal(raw, &i); err != nil {
		t.Fatal(err)
	}
	for _, p := range []*string{&i.Vmlinux, &i.Initrd, &i.Rootfs} {
		*p = filepath.Join(*imageDir, *p)
	}
	return i
}

// guest is a machine with the real guest in it.
type guest struct {
	*Machine
	vcpus               int
	layers              []string // of its disk, the top last
	socket, consolePath string
}

// config makes a machine's files in a directory of its own: disk layers so far, and a fresh one on top.
func (i image) config(t *testing.T, vcpus int, layers []string) (*guest, Config) {
	t.Helper()
	dir := t.TempDir()
	top := filepath.Join(dir, "top.layer")
	if err := cow.Create(top, i.DiskBytes); err != nil {
		t.Fatal(err)
	}
	g := &guest{vcpus: vcpus, socket: filepath.Join(dir, "vsock"), consolePath: filepath.Join(dir, "console.log")}
	disk := Disk{ID: "root", Base: openFile(t, i.Rootfs, os.O_RDONLY), Top: openFile(t, top, os.O_RDWR)}
	for _, l := range layers {
		disk.Layers = append(disk.Layers, openFile(t, l, os.O_RDONLY))
	}
	g.layers = append(append(g.layers, layers...), top)
	return g, Config{
		Host: testHost(), VCPUs: vcpus, MemoryBytes: 512 * mib, Disks: []Disk{disk},
		Vsock:   &Vsock{CID: 3, Listener: listenVsock(t, g.socket)},
		Console: &Console{Log: openFile(t, g.consolePath, os.O_CREATE|os.O_RDWR)},
		Balloon: &Balloon{Reporting: true},
	}
}

func bootGuest(t *testing.T, i image, vcpus int, nets ...Net) *guest {
	t.Helper()
	g, cfg := i.config(t, vcpus, nil)
	cfg.Net = nets
	return bootConfig(t, i, g, cfg, i.Cmdline)
}

// bootConfig boots the machine of g and returns when its envd has said hello.
func bootConfig(t *testing.T, i image, g *guest, cfg Config, kernelCmdline string) *guest {
	t.Helper()
	hello, err := net.Dial("unix", g.socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = hello.Close() })
	start := time.Now()
	k := Kernel{Image: openFile(t, i.Vmlinux, os.O_RDONLY), Initrd: openFile(t, i.Initrd, os.O_RDONLY), Cmdline: strings.TrimSpace(kernelCmdline + " " + *cmdline)}
	m, err := Boot(cfg, k, zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.DebugLevel))
	if err != nil {
		t.Fatal(err)
	}
	g.Machine = m
	g.closeAtEnd(t)
	said := make(chan string, 1)
	go func() {
		_, _ = fmt.Fprintf(hello, "LISTEN %d\n", hostHelloPort)
		r := bufio.NewReader(hello)
		if parked, err := r.ReadString('\n'); err != nil || parked != "OK\n" {
			return
		}
		line, _ := r.ReadString('\n')
		said <- line
	}()
	select {
	case line := <-said:
		s := m.Status()
		t.Logf("booted in %v: %q; %d exits, %d of them port I/O, %d MMIO; %d MiB resident", time.Since(start).Round(time.Millisecond),
			line, s.Exits, s.IOExits, s.MMIOExits, s.ResidentBytes>>20)
	case <-m.Done():
		t.Fatalf("the guest ended while booting: %+v\n%s", m.End().Reason, m.End().ConsoleTail)
	case <-time.After(guestTimeout):
		t.Fatalf("no hello after %v; status %+v", guestTimeout, m.Status())
	}
	return g
}

// restoreGuest restores the snapshot of another guest: its layers are frozen and get a fresh top.
func restoreGuest(t *testing.T, i image, old *guest, from savedFiles, nets ...Net) *guest {
	t.Helper()
	g, cfg := i.config(t, old.vcpus, old.layers)
	cfg.Net = nets
	m, phases, err := Restore(cfg, from.open(t), false, zerolog.New(zerolog.NewTestWriter(t)))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("restored: %+v", phases)
	g.Machine = m
	g.closeAtEnd(t)
	return g
}

func (g *guest) closeAtEnd(t *testing.T) {
	t.Cleanup(func() {
		if t.Failed() && g.console != nil {
			g.console.Flush()
			log, _ := os.ReadFile(g.consolePath)
			t.Logf("console:\n%s", log)
		}
		closeMachine(t, g.Machine)
	})
}

// dial connects to a port of the guest.
func (g *guest) dial(ctx context.Context, port int) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", g.socket)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := fmt.Fprintf(c, "CONNECT %d\n", port); err != nil {
		_ = c.Close()
		return nil, err
	}
	var line []byte
	for b := make([]byte, 1); len(line) < 64; line = append(line, b[0]) {
		if _, err := io.ReadFull(c, b); err != nil {
			_ = c.Close()
			return nil, fmt.Errorf("connect to guest port %d: %w", port, err)
		}
		if b[0] == '\n' {
			break
		}
	}
	if !strings.HasPrefix(string(line), "OK ") {
		_ = c.Close()
		return nil, fmt.Errorf("connect to guest port %d: %q", port, line)
	}
	return c, nil
}

// health asks envd over HTTP whether it is well, once, on a connection of its own.
func (g *guest) health(t *testing.T) {
	t.Helper()
	start := time.Now()
	client := http.Client{Timeout: guestTimeout, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return g.dial(ctx, healthPort) },
	}}
	resp, err := client.Get("http://guest/health")
	if err != nil {
		t.Fatalf("health: %v (after %v)", err, time.Since(start))
	}
	_ = resp.Body.Close()
	if resp.StatusCode >= 300 {
		t.Fatalf("health: %s", resp.Status)
	}
	t.Logf("healthy, answered in %v", time.Since(start).Round(time.Millisecond))
}

// rpc calls the guest's PID 1.
func (g *guest) rpc(t *testing.T, f func(context.Context, guestpb.GuestService) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), guestTimeout)
	defer cancel()
	c, err := g.dial(ctx, guestRPCPort)
	if err != nil {
		t.Fatal(err)
	}
	client := ttrpc.NewClient(c)
	defer func() { _ = client.Close() }()
	if err := f(ctx, guestpb.NewGuestClient(client)); err != nil {
		t.Fatal(err)
	}
}

// clean fails the test if the guest's kernel complained; the console shows warnings and worse.
func (g *guest) clean(t *testing.T) {
	t.Helper()
	g.console.Flush()
	log, err := os.ReadFile(g.consolePath)
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"Kernel panic", "BUG:", "Oops", "soft lockup", "rcu_sched", "hung_task", "I/O error"} {
		if strings.Contains(string(log), bad) {
			t.Errorf("the guest's kernel said %q:\n%s", bad, log)
		}
	}
}

func TestRealGuestBootsAndPowersOff(t *testing.T) {
	i := needImage(t)
	for _, vcpus := range []int{1, 2} {
		g := bootGuest(t, i, vcpus)
		g.health(t)
		g.rpc(t, func(ctx context.Context, c guestpb.GuestService) error {
			_, err := c.Shutdown(ctx, &guestpb.ShutdownRequest{})
			if errors.Is(err, ttrpc.ErrClosed) {
				return nil // the guest's end ends its connections, and may be quicker than the answer
			}
			return err
		})
		select {
		case <-g.Done():
		case <-time.After(guestTimeout):
			t.Fatal("the guest did not power off")
		}
		if g.End().Reason != ReasonPowerOff {
			t.Errorf("ended by %s: %s\n%s", g.End().Reason, g.End().Detail, g.End().ConsoleTail)
		}
		g.clean(t)
	}
}

// The template's life: a cold boot, a full snapshot, then pauses and wakes in a chain, each a diff against the first.
func TestRealGuestSleepsAndWakes(t *testing.T) {
	i := needImage(t)
	g := bootGuest(t, i, 2)
	g.health(t)

	// In place, first without and then after a snapshot.
	if err := g.Pause(); err != nil {
		t.Fatal(err)
	}
	if err := g.Resume(); err != nil {
		t.Fatal(err)
	}
	g.health(t)
	full, saved := timedSave(t, g, "")
	t.Logf("full: %d data pages, %d MiB on disk, state %d KiB", saved.DataPages, saved.MemoryBytes>>20, saved.StateBytes>>10)
	verify(t, full)
	g2 := restoreGuest(t, i, g, full)
	if err := g.Resume(); err != nil {
		t.Fatal(err)
	}
	g.health(t)
	g.clean(t)
	if err := g.Pause(); err != nil { // its CPUs are the others' now
		t.Fatal(err)
	}

	last := g2
	for cycle := range *cycles {
		last.health(t)
		diff, saved := timedSave(t, last, full.base)
		t.Logf("cycle %d: %+v", cycle, saved)
		verify(t, diff)
		next := restoreGuest(t, i, last, diff)
		last.clean(t)
		last = next
	}
	last.health(t)
	s := last.Status()
	t.Logf("last: %+v", s)
	last.clean(t)
}

func timedSave(t *testing.T, g *guest, base string) (savedFiles, Saved) {
	t.Helper()
	start := time.Now()
	s, saved := save(t, g.Machine, base)
	t.Logf("paused and saved in %v", time.Since(start).Round(time.Millisecond))
	return s, saved
}
