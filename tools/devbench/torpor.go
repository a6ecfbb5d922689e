package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"

	"torpor/agent/cell"
	"torpor/agent/vmproc"
	"torpor/api/vmmpb"
	"torpor/tools/devbench/peer"
	"torpor/vmm/cow"
)

const (
	machineName = "devbench"
	vmmBinary   = "/usr/lib/torpor/bin/torpor-vmm"
	ownCID      = 3
)

// torpor is our own VMM, started and jailed as the agent does it.
type torpor struct {
	dir  string
	vmms *vmproc.Supervisor
	vm   *vmproc.Process
	host net.Conn // waits for the guest to connect
}

func newTorpor(dir string, net *network) (*torpor, error) {
	cells, err := cell.Open(cell.DefaultConfig)
	if err != nil {
		return nil, err
	}
	return &torpor{dir: dir, vmms: &vmproc.Supervisor{
		Binary: vmmBinary, RunDir: filepath.Join(dir, "run"), KVM: "/dev/kvm", Cells: cells,
		OpenTap: func(string) (*os.File, error) { return net.tap() },
	}}, nil
}

func (t *torpor) start(ctx context.Context, console, cmdline string) (int, <-chan struct{}, error) {
	in := func(name string) string { return filepath.Join(t.dir, name) }
	layer := in("layer")
	if err := os.RemoveAll(layer); err != nil {
		return 0, nil, err
	}
	if err := cow.Create(layer, diskBytes); err != nil {
		return 0, nil, err
	}
	vm, err := t.vmms.Start(ctx, machineName, in("vmm.log"))
	if err != nil {
		return 0, nil, err
	}
	t.vm = vm
	if t.host, err = net.Dial("unix", t.vmms.VsockSocket(machineName)); err != nil {
		return 0, nil, errors.Join(err, t.vm.Kill(ctx))
	}
	go t.serve() // ends with the connection
	_, err = vm.Boot(ctx, &vmmpb.BootRequest{
		Machine: &vmmpb.Machine{
			Vcpus: 1, MemoryBytes: memoryMiB << 20,
			Disks:   []*vmmpb.Disk{{Id: "d", Base: in(diskName), Top: layer}},
			Vsock:   &vmmpb.Vsock{Cid: ownCID},
			Nets:    []*vmmpb.Net{{Id: "n", Tap: tapName, Mac: guestMAC}},
			Console: &vmmpb.Console{Enabled: true, Log: console},
		},
		Kernel: in(kernelName), Initrd: in(initrdName), Cmdline: cmdline,
	})
	if err != nil {
		return 0, nil, errors.Join(err, t.stop(ctx))
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = vm.Wait(ctx, &vmmpb.WaitRequest{}) // how it ended shows in what the guest said
	}()
	return vm.Identity().PID, ended, nil
}

func (t *torpor) stop(ctx context.Context) error {
	_ = t.host.Close() // serve may have
	return errors.Join(t.vm.Kill(ctx), t.vmms.Clear(machineName))
}

// serve lets the guest connect to the peer's port, once, and answers it.
func (t *torpor) serve() {
	_, err := fmt.Fprintf(t.host, "LISTEN %d\n", peer.Port)
	if err == nil {
		_, err = io.ReadFull(t.host, make([]byte, len("OK\n")))
	}
	if err == nil {
		err = peer.Serve(t.host)
	}
	if err != nil && !errors.Is(err, net.ErrClosed) {
		fmt.Fprintln(os.Stderr, "the guest's connection:", err)
	}
}
