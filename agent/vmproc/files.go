package vmproc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/protobuf/proto"

	"torpor/api/fdpass"
	"torpor/api/vmmpb"
)

// Boot is that of vmmpb.VMMService, but the request names files by their paths: they are opened here and handed over. A console
// log is made if there is none.
func (p *Process) Boot(ctx context.Context, r *vmmpb.BootRequest) (*vmmpb.BootResponse, error) {
	if err := p.limit(r.GetMachine()); err != nil {
		return nil, err
	}
	r = proto.CloneOf(r)
	h, err := p.handOver(ctx)
	if err != nil {
		return nil, err
	}
	defer h.close()
	p.claimed(r.GetMachine())
	h.machine(r.GetMachine())
	h.send(&r.Kernel, os.O_RDONLY)
	h.send(&r.Initrd, os.O_RDONLY)
	if err := h.done(); err != nil {
		return nil, err
	}
	return p.VMMService.Boot(ctx, r)
}

// Restore is that of vmmpb.VMMService, but the request names files by their paths; see Boot.
func (p *Process) Restore(ctx context.Context, r *vmmpb.RestoreRequest) (*vmmpb.RestoreResponse, error) {
	if err := p.limit(r.GetMachine()); err != nil {
		return nil, err
	}
	r = proto.CloneOf(r)
	h, err := p.handOver(ctx)
	if err != nil {
		return nil, err
	}
	defer h.close()
	p.claimed(r.GetMachine())
	h.machine(r.GetMachine())
	h.send(&r.State, os.O_RDONLY)
	h.send(&r.BaseMemory, os.O_RDONLY)
	for i := range r.GetMemoryLayers() {
		h.send(&r.MemoryLayers[i], os.O_RDONLY)
	}
	h.sendIfThere(&r.WorkingSet)
	if err := h.done(); err != nil {
		return nil, err
	}
	return p.VMMService.Restore(ctx, r)
}

// Save is that of vmmpb.VMMService, but the request names files by the paths at which it makes them. They must not exist; on
// error they are gone again. The new tops exist.
func (p *Process) Save(ctx context.Context, r *vmmpb.SaveRequest) (_ *vmmpb.SaveResponse, err error) {
	r = proto.CloneOf(r)
	h, err := p.handOver(ctx)
	if err != nil {
		return nil, err
	}
	defer h.close()
	defer func() {
		if err != nil {
			err = errors.Join(err, h.removeMade())
		}
	}()
	h.send(&r.State, os.O_CREATE|os.O_EXCL|os.O_RDWR)
	h.send(&r.Memory, os.O_CREATE|os.O_EXCL|os.O_RDWR)
	for i := range r.GetTops() {
		h.send(&r.Tops[i], os.O_RDWR)
	}
	if err := h.done(); err != nil {
		return nil, err
	}
	return p.VMMService.Save(ctx, r)
}

// Checkpoint is that of vmmpb.VMMService, but the request names files by their paths. Those of state and memory are made: they
// must not exist, and on error they are gone again. The new tops exist, and stay whatever comes of it.
func (p *Process) Checkpoint(ctx context.Context, r *vmmpb.CheckpointRequest) (_ *vmmpb.CheckpointResponse, err error) {
	r = proto.CloneOf(r)
	h, err := p.handOver(ctx)
	if err != nil {
		return nil, err
	}
	defer h.close()
	defer func() {
		if err != nil {
			err = errors.Join(err, h.removeMade())
		}
	}()
	h.send(&r.State, os.O_CREATE|os.O_EXCL|os.O_RDWR)
	h.send(&r.Memory, os.O_CREATE|os.O_EXCL|os.O_RDWR)
	for i := range r.Tops {
		h.send(&r.Tops[i], os.O_RDWR)
	}
	if err := h.done(); err != nil {
		return nil, err
	}
	return p.VMMService.Checkpoint(ctx, r)
}

// WorkingSet is that of vmmpb.VMMService, but the request names the file by the path at which it is made, in place of one that is
// there.
func (p *Process) WorkingSet(ctx context.Context, r *vmmpb.WorkingSetRequest) (*vmmpb.WorkingSetResponse, error) {
	r = proto.CloneOf(r)
	h, err := p.handOver(ctx)
	if err != nil {
		return nil, err
	}
	defer h.close()
	h.send(&r.File, os.O_CREATE|os.O_TRUNC|os.O_RDWR)
	if err := h.done(); err != nil {
		return nil, err
	}
	return p.VMMService.WorkingSet(ctx, r)
}

// handover is the files of one call on their way to the process.
type handover struct {
	ctx  context.Context
	p    *Process
	to   *fdpass.Sender
	made []string // paths of files that did not exist before
	err  error    // the first; nothing is sent after it
}

func (p *Process) handOver(ctx context.Context) (*handover, error) {
	to, err := fdpass.Dial(ctx, p.files)
	if err != nil {
		return nil, err
	}
	return &handover{ctx: ctx, p: p, to: to}, nil
}

// close ends the connection: what the call has not taken is closed in the process.
func (h *handover) close() { h.to.Close() }

// done returns when the process holds every file.
func (h *handover) done() error {
	if h.err == nil {
		h.err = h.to.Wait(h.ctx)
	}
	return h.err
}

// machine sends the files of a machine and puts their names into it.
func (h *handover) machine(m *vmmpb.Machine) {
	for _, d := range m.GetDisks() {
		h.send(&d.Base, os.O_RDONLY)
		for i := range d.GetLayers() {
			h.send(&d.Layers[i], os.O_RDONLY)
		}
		h.send(&d.Top, os.O_RDWR)
	}
	for _, n := range m.GetNets() {
		h.tap(&n.Tap)
	}
	if c := m.GetClaim(); c != nil {
		h.send(&c.Log, os.O_CREATE|os.O_WRONLY|os.O_APPEND)
	}
	if c := m.GetConsole(); c.GetEnabled() {
		h.send(&c.Log, os.O_CREATE|os.O_RDWR)
	}
}

// tap opens the tap of a name, sends it, and replaces the name by the one it was sent under.
func (h *handover) tap(name *string) {
	if h.err != nil {
		return
	}
	if h.p.openTap == nil {
		h.err = fmt.Errorf("open tap %s for the VMM: no network cards here", *name)
		return
	}
	f, err := h.p.openTap(*name)
	if err != nil {
		h.err = fmt.Errorf("open tap %s for the VMM: %w", *name, err)
		return
	}
	defer f.Close()
	h.pass(name, f)
}

// send opens the file at a path, sends it, and replaces the path by the name it was sent under. An empty path stays.
func (h *handover) send(path *string, flags int) {
	if *path == "" || h.err != nil {
		return
	}
	f, err := os.OpenFile(*path, flags, 0o600)
	if err != nil {
		h.err = fmt.Errorf("open a file for the VMM: %w", err)
		return
	}
	defer f.Close()
	if flags&os.O_EXCL != 0 {
		h.made = append(h.made, *path)
	}
	h.pass(path, f)
}

// pass sends an open file and replaces its name by the one it was sent under.
func (h *handover) pass(name *string, f *os.File) {
	*name = fileName(h.p.sent.Add(1), *name)
	h.err = h.to.Post(h.ctx, *name, f)
}

// sendIfThere is send for reading, but a file that is missing is none.
func (h *handover) sendIfThere(path *string) {
	if _, err := os.Stat(*path); errors.Is(err, os.ErrNotExist) {
		*path = ""
	}
	h.send(path, os.O_RDONLY)
}

func (h *handover) removeMade() error {
	var errs []error
	for _, path := range h.made {
		errs = append(errs, os.Remove(path))
	}
	return errors.Join(errs...)
}

// fileName makes a name that is used once, and tells whoever reads it in an error which file it is.
func fileName(n uint64, path string) string {
	printable := strings.Map(func(r rune) rune {
		if r <= ' ' || r > '~' {
			return '_'
		}
		return r
	}, filepath.Base(path))
	name := fmt.Sprintf("%d:%s", n, printable)
	return name[:min(len(name), fdpass.MaxName)]
}
