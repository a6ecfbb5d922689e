package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"torpor/agent/template"
	"torpor/api/vmmpb"
)

// bootRequest names every file of a boot on the sandbox's own disk.
func (s *Sandbox) bootRequest(t *template.Template, from *source, top string) (*vmmpb.BootRequest, error) {
	layers, err := s.diskBelow(t, from.layers)
	if err != nil {
		return nil, err
	}
	return &vmmpb.BootRequest{Machine: s.machine(t, layers, top), Kernel: t.Kernel, Initrd: t.Initrd, Cmdline: t.Cmdline}, nil
}

// boot starts the kernel and waits until envd says that it is there.
func (s *Sandbox) boot(ctx context.Context, l *live, req *vmmpb.BootRequest, times phases, at time.Time) (time.Time, error) {
	hello, err := l.guest.ListenHello()
	if err != nil {
		return at, err
	}
	defer hello.Close()
	call, cancel := context.WithTimeout(ctx, s.m.cfg.Budgets.Restore)
	defer cancel()
	if _, err := l.vm.Boot(call, req); err != nil {
		return at, fmt.Errorf("boot the VM: %w", err)
	}
	budget, cancel := context.WithTimeoutCause(ctx, s.m.cfg.Budgets.ColdBoot, errors.New("envd said no hello in time"))
	defer cancel()
	budget, release := whileLives(budget, l.vm)
	defer release()
	if _, err := hello.Wait(budget); err != nil {
		return at, err
	}
	return times.add("boot", at), nil
}
