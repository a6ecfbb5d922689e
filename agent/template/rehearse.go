package template

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"torpor/agent/guest"
	"torpor/api/guestpb"
	"torpor/api/vmmpb"
	"torpor/vmm/snapshot"
)

// A rehearsal is the first restore of a template, which serves nobody: it finds out which pages of the memory are wanted first.
// They are kept beside the template, as advice for every restore that is to come. A template is as good without, only slower to
// start where its memory is not in the page cache.

// WorkingSet returns the path of the file that says which pages of the template's memory a start needs. It may be missing.
func (t *Template) WorkingSet() string { return t.Snapshot.Dir + ".working-set" }

// rehearsed reports whether there is a working set that can be read.
func (t *Template) rehearsed() bool {
	f, err := os.Open(t.WorkingSet())
	if err != nil {
		return false
	}
	defer f.Close()
	_, err = snapshot.ReadWorkingSet(f)
	return err == nil
}

// Rehearse restores the template as a create does, does what comes first there and what many do next, and records after each
// step what it took.
func (b *Builder) Rehearse(ctx context.Context, t *Template) (err error) {
	dir := t.Snapshot.Dir
	name, layer, draft := "rehearsal-"+filepath.Base(dir), dir+".rehearsal.layer", t.WorkingSet()+".tmp"
	defer func() {
		err = errors.Join(err, os.RemoveAll(layer), os.RemoveAll(draft))
		if err != nil {
			err = fmt.Errorf("rehearse the start of template %s: %w", t.ID, err)
		}
	}()
	if err := os.RemoveAll(layer); err != nil { // left by an agent that was killed
		return err
	}
	if err := b.Layers.Create(layer, t.DiskBytes); err != nil {
		return err
	}
	// What is in the page cache looks touched where its neighbour was.
	if err := b.Layers.Evict(t.Snapshot.Path(MemoryFile)); err != nil {
		return err
	}
	start, cancel := context.WithTimeout(ctx, b.Budgets.VMMStart)
	defer cancel()
	vm, err := b.VMMs.Start(start, name, dir+".vmm.log")
	if err != nil {
		return err
	}
	defer func() {
		kill, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.Budgets.Kill)
		defer cancel()
		err = errors.Join(err, vm.Kill(kill), b.VMMs.Clear(name))
	}()
	budget, cancel := context.WithTimeout(ctx, b.Budgets.Restore+b.Budgets.Handshake+b.Budgets.WarmUp)
	defer cancel()
	req := &vmmpb.RestoreRequest{
		State: t.Snapshot.Path(StateFile), BaseMemory: t.Snapshot.Path(MemoryFile), Recording: true,
		Machine: t.Machine([]string{t.Layer()}, layer, &vmmpb.Vsock{Cid: guestCID}, &vmmpb.Console{Enabled: true}),
	}
	if _, err := vm.Restore(budget, req); err != nil {
		return fmt.Errorf("restore: %w", err)
	}
	for _, step := range guest.At(b.VMMs.VsockSocket(name)).Rehearsal(rehearsalGreeting()) {
		if err := step(budget); err != nil {
			return err
		}
		if _, err := vm.WorkingSet(budget, &vmmpb.WorkingSetRequest{File: draft}); err != nil {
			return err
		}
	}
	return os.Rename(draft, t.WorkingSet())
}

// rehearsalGreeting is as long as that of a sandbox.
func rehearsalGreeting() *guestpb.HandshakeRequest {
	return &guestpb.HandshakeRequest{
		Incarnation: 1, Entropy: guest.Entropy(), SandboxId: "rehearsal", TemplateId: "rehearsal",
		DefaultUser: "user", DefaultWorkdir: "/home/user",
	}
}
