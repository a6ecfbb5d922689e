package machine

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"torpor/api/guestpb"
	"torpor/vmm/x86"
)

var matrix = flag.Bool("matrix", false, "boot every shape of the boot matrix, not a few of them")

// shapeCell is one shape of the boot matrix.
type shapeCell struct {
	vcpus   int
	memory  uint64
	console bool
}

func (c shapeCell) String() string {
	return fmt.Sprintf("%d vCPU, %d MiB, console %t", c.vcpus, c.memory/mib, c.console)
}

// cells are all shapes with -matrix, else the corners.
func cells() []shapeCell {
	if !*matrix {
		return []shapeCell{{1, 128 * mib, false}, {2, 512 * mib, true}, {4, 4096 * mib, false}}
	}
	var out []shapeCell
	for _, vcpus := range []int{1, 2, 4} {
		for _, memory := range []uint64{128, 512, 2048, 4096} {
			for _, console := range []bool{false, true} {
				out = append(out, shapeCell{vcpus, memory * mib, console})
			}
		}
	}
	return out
}

// quietCmdline is an image's command line for a machine without a serial port.
func quietCmdline(line string) string {
	words := slices.DeleteFunc(strings.Fields(line), func(w string) bool {
		return strings.HasPrefix(w, "console=") || strings.HasPrefix(w, "8250.")
	})
	return strings.Join(append(words, "8250.nr_uarts=0"), " ")
}

// exits are what a boot to envd's hello costs in exits from the guest.
type exits struct {
	port, mmio uint64 // that returned from KVM_RUN to us (Status)
	kvm        uint64 // all, by KVM's own count; 0 where debugfs is not mounted
	// work is kvm without what the host's clock makes: its interrupts while the guest runs, and for each interrupt of the guest, nearly
	// all of them timer ticks, the window for it and the write that arms the next. An emulated host boots ten times slower than
	// hardware, so it takes ten times as many ticks.
	work uint64
}

func (m *Machine) exits(counters map[string]uint64) exits {
	s := m.Status()
	e := exits{port: s.IOExits, mmio: s.MMIOExits, kvm: counters["exits"]}
	ticks := counters["irq_exits"] + counters["irq_window_exits"] + counters["irq_injections"]
	e.work = e.kvm - min(e.kvm, ticks)
	return e
}

// bootDevices are disk, vsock, rng and balloon.
const bootDevices = 4

// budget is what a shape may cost. It is what was measured and some margin, and only ever goes down: the aim is 300 port exits and
// 6,000 exits without a console.
//
// Port exits: without pci=off 85 more were the search for a PCI bus; each vCPU beyond the first has its start announced in the CMOS
// (the reset vector of a PC) by 4 writes; a serial port takes 64 to be found, and one for each character of a kernel that complains of a
// slow host. MMIO exits: some 60 for each device to set up. All exits of one vCPU are below 6,000, those of more are not: each has its own
// clock, and its own CPUID and MSRs to read.
func (c shapeCell) budget() exits {
	b := exits{port: 8 + 4*uint64(c.vcpus), mmio: 70 * bootDevices, work: 3000 * uint64(c.vcpus)}
	if c.console {
		b.port += 600
	}
	return b
}

// kvmDirs lists where KVM shows the counters of each VM there is. A name begins with the id of the thread that made the VM.
func kvmDirs() []string {
	dirs, _ := filepath.Glob("/sys/kernel/debug/kvm/*-*")
	return dirs
}

// kvmCounters reads the counters of the VMs that are not among others: what Documentation/virt/kvm/api.rst calls KVM_STATS_TYPE_*
// has its other face there.
func kvmCounters(others []string) map[string]uint64 {
	out := map[string]uint64{}
	for _, dir := range kvmDirs() {
		files, err := os.ReadDir(dir)
		if err != nil || slices.Contains(others, dir) {
			continue
		}
		for _, f := range files {
			b, err := os.ReadFile(filepath.Join(dir, f.Name()))
			if n, perr := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64); err == nil && perr == nil && n > 0 {
				out[f.Name()] += n
			}
		}
	}
	return out
}

// Each shape boots the real guest to envd ready, within a budget of exits that only ever goes down.
func TestBootMatrix(t *testing.T) {
	i := needImage(t)
	for _, cell := range cells() {
		t.Run(cell.String(), func(t *testing.T) {
			g, cfg := i.config(t, cell.vcpus, nil)
			cfg.MemoryBytes = cell.memory
			line := i.Cmdline
			if !cell.console {
				cfg.Console, line = nil, quietCmdline(line)
			}
			others, start := kvmDirs(), time.Now()
			g = bootConfig(t, i, g, cfg, line)
			took, counters := time.Since(start), kvmCounters(others)
			e, budget := g.exits(counters), cell.budget()
			g.health(t)
			t.Logf("boot matrix | %v | %v | %d exits, %d without the clock's | to the VMM %d port, %d MMIO | %v",
				cell, took.Round(10*time.Millisecond), e.kvm, e.work, e.port, e.mmio, counters)
			if e.port > budget.port || e.mmio > budget.mmio || e.work > budget.work {
				t.Errorf("%d port, %d MMIO exits, %d without the clock's: the budget is %d, %d and %d",
					e.port, e.mmio, e.work, budget.port, budget.mmio, budget.work)
			}
		})
	}
}

// The guest's kernel finds exactly the devices it was given, by ACPI, and has a driver for each. It runs with a CPU template, so
// that a template is seen to be enough for a Debian guest.
func TestGuestListsExactlyItsDevices(t *testing.T) {
	i := needImage(t)
	g, cfg := i.config(t, 1, nil)
	cfg.CPUTemplate = x86.TemplateV3
	cfg.Disks = append(cfg.Disks, Disk{ID: "more", Base: openFile(t, i.Rootfs, os.O_RDONLY)})
	g = bootConfig(t, i, g, cfg, i.Cmdline)
	g.rpc(t, func(ctx context.Context, c guestpb.GuestService) error {
		_, err := c.Handshake(ctx, &guestpb.HandshakeRequest{
			Incarnation: 1, RealtimeUnixNano: time.Now().UnixNano(), Entropy: make([]byte, 32), SandboxId: "test", DefaultUser: "root",
		})
		return err
	})
	acpi := g.list(t, "/sys/bus/acpi/devices")
	count := func(prefix string) (n int) {
		for _, name := range acpi {
			if strings.HasPrefix(name, prefix) {
				n++
			}
		}
		return n
	}
	const devices = 5 // two disks, vsock, rng, balloon
	if got := count("LNRO0005:"); got != devices {
		t.Errorf("%d virtio windows in %v", got, acpi)
	}
	if got := count("PNP0501:"); got != 1 {
		t.Errorf("%d serial ports in %v", got, acpi)
	}
	if got := g.list(t, "/sys/bus/virtio/devices"); len(got) != devices {
		t.Errorf("virtio devices %v", got)
	}
	for driver, want := range map[string]int{"virtio_blk": 2, "vmw_vsock_virtio_transport": 1, "virtio_rng": 1, "virtio_balloon": 1} {
		bound := 0
		for _, name := range g.list(t, "/sys/bus/virtio/drivers/"+driver) {
			if strings.HasPrefix(name, "virtio") {
				bound++
			}
		}
		if bound != want {
			t.Errorf("%d devices of %s, want %d", bound, driver, want)
		}
	}
	g.clean(t)
}

// list names the entries of a directory in the guest, as envd tells.
func (g *guest) list(t *testing.T, dir string) []string {
	t.Helper()
	client := http.Client{Timeout: guestTimeout, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return g.dial(ctx, healthPort) },
	}}
	ask, err := json.Marshal(map[string]any{"path": dir, "depth": 1})
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://guest/filesystem.Filesystem/ListDir", bytes.NewReader(ask))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.SetBasicAuth("root", "")
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	var answer struct {
		Entries []struct{ Name string }
	}
	if err == nil {
		err = json.Unmarshal(body, &answer)
	}
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("list %s: %s %v %s", dir, resp.Status, err, body)
	}
	var names []string
	for _, e := range answer.Entries {
		names = append(names, e.Name)
	}
	return names
}
