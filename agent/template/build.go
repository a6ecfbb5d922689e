package template

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"torpor/agent/guest"
	"torpor/agent/timing"
	"torpor/agent/vmproc"
	"torpor/api/vmmpb"
)

// guestCID is the vsock address of every guest.
const guestCID = 3

const consoleBytes = 256 << 10

// Builder boots a machine once and saves it.
type Builder struct {
	VMMs   *vmproc.Supervisor
	Layers interface {
		Create(path string, virtualSize uint64) error
		Seal(ctx context.Context, path string) error
		Evict(path string) error
	}
	Budgets timing.Budgets
}

// Build boots the job's image on a fresh disk layer, waits for envd, warms the guest up, and saves it into the draft.
func (b *Builder) Build(ctx context.Context, job Job) (err error) {
	if err := b.Layers.Create(job.Draft.Path(layerFile), job.DiskBytes); err != nil {
		return err
	}
	vm, err := b.start(ctx, job)
	if err != nil {
		return err
	}
	defer func() {
		kill, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.Budgets.Kill)
		defer cancel()
		err = errors.Join(err, vm.Kill(kill), b.VMMs.Clear(job.Name))
	}()
	if err := b.bootAndSave(ctx, vm, job); err != nil {
		return fmt.Errorf("build template from image %s: %w; see %s", job.Image.ShortDigest(), err, job.Console)
	}
	if err := b.stop(ctx, vm); err != nil {
		return err
	}
	// Every sandbox of the template reads this layer, for as long as there is one.
	return b.Layers.Seal(ctx, job.Draft.Path(layerFile))
}

func (b *Builder) start(ctx context.Context, job Job) (*vmproc.Process, error) {
	budget, cancel := context.WithTimeout(ctx, b.Budgets.VMMStart)
	defer cancel()
	return b.VMMs.Start(budget, job.Name, job.Log)
}

func (b *Builder) bootAndSave(ctx context.Context, vm *vmproc.Process, job Job) error {
	socket := b.VMMs.VsockSocket(job.Name)
	hello, err := guest.ListenHello(socket)
	if err != nil {
		return err
	}
	defer hello.Close()
	if err := b.boot(ctx, vm, job); err != nil {
		return err
	}
	// Whatever is waited for from here on, a guest that ends says so itself.
	alive, end := context.WithCancelCause(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		if cause := ended(alive, vm); cause != nil {
			end(cause)
		}
	}()
	defer func() { end(nil); <-watched }()
	err = b.saveWhenWarm(alive, vm, job, hello, guest.At(socket))
	if cause := context.Cause(alive); err != nil && cause != nil && ctx.Err() == nil {
		return fmt.Errorf("%w (%w)", err, cause)
	}
	return err
}

// ended returns why a guest ended, or nil when ctx ends first.
func ended(ctx context.Context, vm *vmproc.Process) error {
	end, err := vm.Wait(ctx, &vmmpb.WaitRequest{})
	switch {
	case ctx.Err() != nil:
		return nil
	case err != nil:
		return fmt.Errorf("the VMM is lost: %w", err)
	default:
		return fmt.Errorf("the guest ended: %s %s", end.Reason, end.Detail)
	}
}

// boot starts the kernel.
func (b *Builder) boot(ctx context.Context, vm *vmproc.Process, job Job) error {
	budget, cancel := context.WithTimeout(ctx, b.Budgets.Restore)
	defer cancel()
	shape := Template{
		RootFS: filepath.Join(job.ImageDir, job.Image.RootFS),
		VCPUs:  job.VCPUs, MemoryBytes: job.MemoryBytes,
	}
	_, err := vm.Boot(budget, &vmmpb.BootRequest{
		Machine: shape.Machine(nil, job.Draft.Path(layerFile), &vmmpb.Vsock{Cid: guestCID},
			&vmmpb.Console{Enabled: true, Log: job.Console, MaxBytes: consoleBytes}),
		Kernel:  filepath.Join(job.ImageDir, job.Image.Vmlinux),
		Initrd:  filepath.Join(job.ImageDir, job.Image.Initrd),
		Cmdline: job.Image.Cmdline,
	})
	if err != nil {
		return fmt.Errorf("boot: %w", err)
	}
	return nil
}

// saveWhenWarm waits for envd, warms the guest up, and saves it.
func (b *Builder) saveWhenWarm(ctx context.Context, vm *vmproc.Process, job Job, hello *guest.Hello, g *guest.Guest) error {
	boot, cancel := context.WithTimeoutCause(ctx, b.Budgets.ColdBoot, errors.New("envd said no hello in time"))
	defer cancel()
	if _, err := hello.Wait(boot); err != nil {
		return err
	}
	if err := b.warmUp(ctx, g); err != nil {
		return err
	}
	save, cancel := context.WithTimeout(ctx, b.Budgets.Pause+b.Budgets.Save)
	defer cancel()
	if _, err := vm.Pause(save, &vmmpb.PauseRequest{}); err != nil {
		return fmt.Errorf("pause: %w", err)
	}
	_, err := vm.Save(save, &vmmpb.SaveRequest{
		Kind: vmmpb.SaveKind_SAVE_KIND_FULL, State: job.Draft.Path(StateFile), Memory: job.Draft.Path(MemoryFile),
	})
	if err != nil {
		return fmt.Errorf("save: %w", err)
	}
	return nil
}

func (b *Builder) warmUp(ctx context.Context, g *guest.Guest) error {
	budget, cancel := context.WithTimeoutCause(ctx, b.Budgets.WarmUp, errors.New("the warm-up took too long"))
	defer cancel()
	if err := g.WarmUp(budget); err != nil {
		return err
	}
	contact, err := g.Connect(budget)
	if err != nil {
		return err
	}
	defer contact.Close()
	return contact.Sync(budget)
}

// stop lets the VMM flush and go, so that nobody writes to the draft any more.
func (b *Builder) stop(ctx context.Context, vm *vmproc.Process) error {
	budget, cancel := context.WithTimeout(ctx, b.Budgets.Quit+b.Budgets.Kill)
	defer cancel()
	return vm.Stop(budget, b.Budgets.Quit)
}
