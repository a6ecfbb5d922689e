package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"torpor/agent/cell"
	"torpor/agent/pool"
	"torpor/agent/timing"
	"torpor/agent/vmproc"
	"torpor/api/vmmpb"
	"torpor/vmm/cow"
	"torpor/vmm/kvm"

	"github.com/rs/zerolog"
)

const (
	floorMemory = 512 << 20
	floorDisk   = 64 << 20
	// floorMost is how many times the floor a resume may take.
	floorMost = 3
)

// floorGuest counts and makes an exit each time round: its first reply to whoever resumes it. It needs no operating system and
// works on any KVM.
var floorGuest = []byte{
	0x48, 0xc7, 0xc3, 0, 0, 0, 0x02, //       mov rbx, 0x2000000
	0x48, 0xff, 0x03, //                loop: inc qword [rbx]
	0xe6, 0x80, //                            out 0x80, al
	0xeb, 0xf9, //                            jmp loop
}

// floorKernel is the ELF file of the guest.
func floorKernel() []byte {
	const entry, start = 0x1000000, 0x1000
	le := binary.LittleEndian
	b := make([]byte, start, start+len(floorGuest))
	copy(b, "\x7fELF\x02\x01\x01")
	le.PutUint16(b[16:], 2)  // executable
	le.PutUint16(b[18:], 62) // x86-64
	le.PutUint64(b[24:], entry)
	le.PutUint64(b[32:], 64) // program headers
	le.PutUint16(b[54:], 56)
	le.PutUint16(b[56:], 1)
	ph := b[64:]
	le.PutUint32(ph, 1) // PT_LOAD
	le.PutUint64(ph[8:], start)
	le.PutUint64(ph[24:], entry)
	le.PutUint64(ph[32:], uint64(len(floorGuest)))
	le.PutUint64(ph[40:], uint64(len(floorGuest)))
	return append(b, floorGuest...)
}

// floorBench resumes one tiny guest over and over: by the agent's own path (a jailed process of the pool, claimed; files handed
// over; every device a sandbox has) and by the bare ioctls.
type floorBench struct {
	dir  string
	vmms *vmproc.Supervisor
	pool *pool.Pool
}

// measureFloor needs a /dev/kvm, of any kind, and root; nothing else need be up.
func measureFloor(ctx context.Context, o options, w io.Writer) (err error) {
	if o.vmm, err = filepath.Abs(o.vmm); err != nil {
		return err
	}
	b := &floorBench{}
	if b.dir, err = os.MkdirTemp("", "floor-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(b.dir)) }()
	b.vmms = &vmproc.Supervisor{Binary: o.vmm, RunDir: b.in("vm"), KVM: "/dev/kvm"}
	how := "jailed"
	if b.vmms.Cells, err = cell.Open(cell.DefaultConfig); err != nil {
		b.vmms.Cells, how = nil, fmt.Sprintf("not jailed (%v)", err)
	}
	budgets, err := timing.New(1)
	if err != nil {
		return err
	}
	if err := os.Mkdir(b.vmms.RunDir, 0o700); err != nil {
		return err
	}
	budgets.PoolRefill = time.Millisecond
	b.pool = pool.New(ctx, pool.Config{VMMs: b.vmms, Size: 1, VCPUs: 1, Budgets: budgets, Log: zerolog.Nop()})
	defer b.pool.Close()
	if err := b.save(ctx); err != nil {
		return err
	}
	if err := b.pool.Fill(); err != nil {
		return err
	}
	sys, err := kvm.Open()
	if err != nil {
		return err
	}
	defer sys.Close()
	bare, err := newBare(b.in("state"), b.in("mem"))
	if err != nil {
		return err
	}
	var floor, ours []time.Duration
	for range o.rounds + 1 {
		f, err := bare.resume(sys)
		if err != nil {
			return fmt.Errorf("the bare floor: %w", err)
		}
		r, err := b.resume(ctx)
		if err != nil {
			return err
		}
		floor, ours = append(floor, f), append(ours, r)
	}
	floor, ours = floor[1:], ours[1:] // the first warms up
	slices.Sort(floor)
	slices.Sort(ours)
	ratio := float64(percentile(ours, 50)) / float64(percentile(floor, 50))
	fmt.Fprintf(w, "a tiny guest of 1 vCPU, %d MiB, page cache warm; process %s, from the pool; %d rounds, interleaved\n", floorMemory>>20, how, o.rounds)
	for _, l := range []struct {
		what string
		all  []time.Duration
	}{{"resume to the guest's first reply", ours}, {"the bare ioctls and mmap", floor}} {
		fmt.Fprintf(w, "%-36s p50 %8.2f ms   p95 %8.2f ms\n", l.what, millis(percentile(l.all, 50)), millis(percentile(l.all, 95)))
	}
	fmt.Fprintf(w, "a resume takes %.2f times the floor (medians of one run; wanted: at most %d)\n", ratio, floorMost)
	if ratio > floorMost {
		return fmt.Errorf("a resume takes %.2f times the floor", ratio)
	}
	return nil
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func (b *floorBench) in(name string) string { return filepath.Join(b.dir, name) }

func (b *floorBench) machine() *vmmpb.Machine {
	return &vmmpb.Machine{
		Vcpus: 1, MemoryBytes: floorMemory,
		Disks:   []*vmmpb.Disk{{Id: "root", Base: b.in("disk"), Top: b.in("layer")}},
		Vsock:   &vmmpb.Vsock{Cid: guestCID},
		Console: &vmmpb.Console{Enabled: true, Log: b.in("console")},
		Balloon: &vmmpb.Balloon{Reporting: true},
	}
}

// save boots the guest and saves it.
func (b *floorBench) save(ctx context.Context) (err error) {
	err = errors.Join(os.WriteFile(b.in("kernel"), floorKernel(), 0o600), os.WriteFile(b.in("disk"), nil, 0o600),
		os.Truncate(b.in("disk"), floorDisk), cow.Create(b.in("layer"), floorDisk))
	if err != nil {
		return err
	}
	vm, err := b.vmms.Start(ctx, machineName, b.in("log"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, vm.Kill(ctx), b.vmms.Clear(machineName)) }()
	if _, err := vm.Boot(ctx, &vmmpb.BootRequest{Machine: b.machine(), Kernel: b.in("kernel")}); err != nil {
		return err
	}
	if err := replied(ctx, vm); err != nil {
		return err
	}
	if _, err := vm.Pause(ctx, &vmmpb.PauseRequest{}); err != nil {
		return err
	}
	_, err = vm.Save(ctx, &vmmpb.SaveRequest{Kind: vmmpb.SaveKind_SAVE_KIND_FULL, State: b.in("state"), Memory: b.in("mem")})
	return err
}

// resume measures one resume, from the order to the news of the guest's first reply.
func (b *floorBench) resume(ctx context.Context) (took time.Duration, err error) {
	for b.pool.Ready() == 0 {
		time.Sleep(time.Millisecond)
	}
	began := time.Now()
	vm, err := b.pool.Start(ctx, machineName, b.in("log"))
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, vm.Kill(ctx), b.vmms.Clear(machineName)) }()
	if _, err := vm.Restore(ctx, &vmmpb.RestoreRequest{Machine: b.machine(), State: b.in("state"), BaseMemory: b.in("mem")}); err != nil {
		return 0, err
	}
	err = replied(ctx, vm)
	return time.Since(began), err
}

// replied returns when the guest has made an exit.
func replied(ctx context.Context, vm *vmproc.Process) error {
	for {
		s, err := vm.Status(ctx, &vmmpb.StatusRequest{})
		if err != nil {
			return err
		}
		if s.ExitsIo > 0 {
			return nil
		}
	}
}
