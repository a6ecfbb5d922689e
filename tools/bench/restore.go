package main

import (
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"torpor/agent/cell"
	"torpor/agent/guest"
	"torpor/agent/snapcache"
	"torpor/agent/template"
	"torpor/agent/vmproc"
	"torpor/api/guestpb"
	"torpor/api/id"
	"torpor/api/vmmpb"
	"torpor/images/imageset"
	"torpor/tools/rest"
	"torpor/vmm/cow"
)

// A restore of the template is measured in variants, each from the order to the output of a first command.
type variant struct {
	name       string
	cold       bool // the host's page cache is dropped before
	workingSet bool // what a rehearsal of the template touched is read ahead
	qemu       bool // the peer
	ahead      bool // the VMM's process and what it needs of KVM are there before the clock starts, as in the agent's pool
}

var variants = []variant{
	{name: "warm, plain"},
	{name: "warm, ahead", ahead: true},
	{name: "warm, working set", workingSet: true},
	{name: "warm, ahead, working set", ahead: true, workingSet: true},
	{name: "cold, ahead", cold: true, ahead: true},
	{name: "cold, ahead, working set", cold: true, ahead: true, workingSet: true},
	{name: "warm, QEMU", qemu: true},
	{name: "cold, QEMU", qemu: true, cold: true},
}

// restorer restores the template of a host where Torpor is up, past the agent and the control plane.
type restorer struct {
	dir      string
	template *template.Template
	vmms     *vmproc.Supervisor
}

func newRestorer(o options) (*restorer, error) {
	image, err := imageset.Read(filepath.Join(o.data, "images", "base"))
	if err != nil {
		return nil, err
	}
	t, err := findTemplate(o, image.RootFS)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(o.data, "bench-")
	if err != nil {
		return nil, err
	}
	cells, err := cell.Open(cell.DefaultConfig)
	if err != nil {
		return nil, err
	}
	return &restorer{dir, t, &vmproc.Supervisor{Binary: o.vmm, RunDir: filepath.Join(dir, "run"), KVM: "/dev/kvm", Cells: cells}}, nil
}

func (r *restorer) close() { _ = os.RemoveAll(r.dir) } // what stays is only litter

// findTemplate is the newest the agent made.
func findTemplate(o options, rootFS string) (*template.Template, error) {
	manifests, err := filepath.Glob(filepath.Join(o.data, "agent", "templates", "*", "manifest.json"))
	if err != nil {
		return nil, err
	}
	var newest *snapcache.Snapshot
	for _, path := range manifests {
		s, err := snapcache.Load(filepath.Dir(path))
		if err != nil {
			return nil, err
		}
		if newest == nil || s.Manifest.CreatedAt.After(newest.Manifest.CreatedAt) {
			newest = s
		}
	}
	if newest == nil {
		return nil, fmt.Errorf("there is no template below %s", o.data)
	}
	m := newest.Manifest
	return &template.Template{
		ID: m.Owner, Digest: m.Parent, Snapshot: newest, RootFS: filepath.Join(o.data, "images", m.Owner, rootFS),
		VCPUs: m.VCPUs, MemoryBytes: m.MemoryBytes, DiskBytes: m.DiskBytes, EnvdVersion: m.EnvdVersion,
	}, nil
}

// measureRestores writes one CSV line a sample.
func measureRestores(ctx context.Context, o options, w io.Writer) error {
	r, err := newRestorer(o)
	if err != nil {
		return err
	}
	defer r.close()
	var peer *qemu
	if o.peer != "" {
		if peer, err = newQEMU(ctx, r, o.peer); err != nil {
			return err
		}
		defer peer.close()
	}
	out := csv.NewWriter(w)
	if err := out.Write(csvHeader); err != nil {
		return err
	}
	machine := shape{int(r.template.VCPUs), int(r.template.MemoryBytes >> 20)}
	for round := range o.rounds + 1 {
		for _, v := range variants {
			if v.qemu && peer == nil {
				continue
			}
			var s sample
			if v.qemu {
				s = peer.measure(ctx, v)
			} else {
				s = r.measure(ctx, v)
			}
			s.round, s.shape = round, machine
			if err := out.Write(s.fields()); err != nil {
				return err
			}
			if s.err != nil {
				fmt.Fprintf(os.Stderr, "%s: %v\n", v.name, s.err)
			}
		}
		out.Flush()
		if err := errors.Join(out.Error(), ctx.Err()); err != nil {
			return err
		}
		fmt.Fprintf(os.Stderr, "round %d of %d\n", round, o.rounds)
	}
	return nil
}

func (r *restorer) measure(ctx context.Context, v variant) (s sample) {
	s = sample{scenario: v.name}
	layer := filepath.Join(r.dir, "layer")
	if s.err = cow.Create(layer, int64(r.template.DiskBytes)); s.err != nil {
		return s
	}
	defer func() { s.err = errors.Join(s.err, os.Remove(layer)) }()
	w := watch{}
	s.err = r.restore(ctx, v, layer, &w)
	s.phases, s.total, s.bytes = w.phases, w.total(), w.count
	return s
}

func (r *restorer) restore(ctx context.Context, v variant, layer string, w *watch) (err error) {
	var vm *vmproc.Process
	start := func() error {
		vm, err = r.vmms.Start(ctx, machineName, filepath.Join(r.dir, "vmm.log"))
		return err
	}
	defer func() {
		if vm != nil {
			err = errors.Join(err, vm.Kill(context.WithoutCancel(ctx)), r.vmms.Clear(machineName))
		}
	}()
	if v.ahead {
		if err := start(); err != nil {
			return err
		}
		if _, err := vm.Prepare(ctx, &vmmpb.PrepareRequest{Vcpus: r.template.VCPUs}); err != nil {
			return err
		}
	}
	if err := settle(ctx, v.cold); err != nil {
		return err
	}
	w.began = time.Now()
	if !v.ahead {
		if err := start(); err != nil {
			return err
		}
	}
	w.lap("vmm")
	t := r.template
	req := &vmmpb.RestoreRequest{
		State: t.Snapshot.Path(template.StateFile), BaseMemory: t.Snapshot.Path(template.MemoryFile),
		Machine: t.Machine([]string{t.Layer()}, layer, &vmmpb.Vsock{Cid: guestCID},
			&vmmpb.Console{Enabled: true, Log: filepath.Join(r.dir, "console.log")}),
	}
	if v.workingSet {
		req.WorkingSet = t.WorkingSet()
	}
	if _, err := vm.Restore(ctx, req); err != nil {
		return err
	}
	w.lap("restore")
	err = ready(ctx, guest.At(r.vmms.VsockSocket(machineName)), w)
	w.count = faults()
	return err
}

// ready greets the guest and has it run a first command.
func ready(ctx context.Context, g *guest.Guest, w *watch) error {
	sb := rest.Sandbox{SandboxID: id.NewSandbox(), AccessToken: id.NewToken()}
	contact, err := g.Handshake(ctx, &guestpb.HandshakeRequest{
		Incarnation: 1, Entropy: guest.Entropy(), SandboxId: sb.SandboxID, TemplateId: "base", AccessToken: sb.AccessToken,
		DefaultUser: "user", DefaultWorkdir: "/home/user",
	})
	if err != nil {
		return err
	}
	defer contact.Close()
	w.lap("handshake")
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return g.Dial(ctx, guest.EnvdPort) }}
	defer transport.CloseIdleConnections()
	c := &rest.Client{API: "http://sandbox", HTTP: &http.Client{Transport: transport}}
	_, err = c.Output(ctx, sb, firstCommand)
	w.lap("command")
	return err
}

// settle returns when the host is quiet, with its page cache dropped if it is to be cold.
func settle(ctx context.Context, cold bool) error {
	if err := quiet(ctx); err != nil || !cold {
		return err
	}
	if err := dropPageCache(); err != nil {
		return err
	}
	return quiet(ctx)
}

// dropPageCache makes everything that no process has mapped come from the disk (the kernel's
// Documentation/admin-guide/sysctl/vm.rst, drop_caches).
func dropPageCache() error { return os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0) }

// faults is how often the only machine of this host stopped for a page of its memory, by KVM's own count; 0 where it is not shown.
func faults() int64 {
	files, _ := filepath.Glob("/sys/kernel/debug/kvm/*-*/pf_taken") // the pattern is good
	sum := int64(0)
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if err != nil {
			continue // it ended
		}
		n, err := strconv.ParseInt(strings.TrimSpace(string(raw)), 10, 64)
		if err == nil {
			sum += n
		}
	}
	return sum
}
