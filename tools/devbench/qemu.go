package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"

	"github.com/mdlayher/vsock"

	"torpor/tools/devbench/peer"
	"torpor/tools/qemupeer"
)

const (
	diskName = "disk.raw"
	peerCID  = 33 // global on a host, unlike ours
)

// qemu is the peer: the same devices on the same transport, disk and network in user space as ours (vhost=off), vsock in the
// kernel because QEMU has no other.
type qemu struct {
	dir string
	net *network
	l   net.Listener
	cmd *exec.Cmd
	end chan struct{}
}

func newQEMU(dir string, net *network) *qemu { return &qemu{dir: dir, net: net} }

func (q *qemu) start(_ context.Context, console, cmdline string) (_ int, _ <-chan struct{}, err error) {
	if q.l, err = vsock.ListenContextID(vsock.Host, peer.Port, nil); err != nil {
		return 0, nil, err
	}
	go serve(q.l)
	tap, err := q.net.tap()
	if err != nil {
		return 0, nil, errors.Join(err, q.l.Close())
	}
	defer func() { _ = tap.Close() }() // QEMU has it
	in := func(name string) string { return filepath.Join(q.dir, name) }
	args := []string{
		"-M", "microvm,acpi=on,rtc=off,pit=off,pic=off,isa-serial=on", "-accel", "kvm", "-cpu", "host", "-smp", "1", "-m", strconv.Itoa(memoryMiB),
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "file:" + console,
		"-kernel", in(kernelName), "-initrd", in(initrdName), "-append", cmdline,
		"-drive", "if=none,id=d,format=raw,snapshot=on,file=" + in(diskName), "-device", "virtio-blk-device,drive=d",
		"-device", fmt.Sprintf("vhost-vsock-device,guest-cid=%d", peerCID),
		"-netdev", "tap,id=n,fd=3,vhost=off", "-device", "virtio-net-device,netdev=n,mac=" + guestMAC.String(),
	}
	q.cmd = qemupeer.Command(q.dir, args...)
	q.cmd.ExtraFiles = []*os.File{tap} // descriptor 3
	if err := q.cmd.Start(); err != nil {
		return 0, nil, errors.Join(err, q.l.Close())
	}
	q.end = make(chan struct{})
	go func() {
		defer close(q.end)
		_ = q.cmd.Wait() // how it ended shows in what the guest said
	}()
	return q.cmd.Process.Pid, q.end, nil
}

func (q *qemu) stop(context.Context) error {
	_ = q.cmd.Process.Kill() // it may have ended
	<-q.end
	return q.l.Close()
}
