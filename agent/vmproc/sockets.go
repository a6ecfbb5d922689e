package vmproc

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
)

// The sockets of a machine, and the flag of torpor-vmm that names their directory.
const (
	machineFlag   = "--machine"
	controlSocket = "vmm.sock"   // api/vmmpb
	filesSocket   = "files.sock" // api/fdpass
	vsockSocket   = "vsock.sock" // to the guest
)

// descriptors are what a torpor-vmm inherits (see its package comment), in the order of the numbers from 3 on.
type descriptors []*os.File

// openDescriptors makes the sockets of a machine in a directory of its own, in place of those of an earlier one. They are there
// before the process is: who connects to one waits in its queue until the process serves it, or is told when it dies.
func (s *Supervisor) openDescriptors(dir string) (d descriptors, err error) {
	if err := os.RemoveAll(dir); err != nil {
		return nil, fmt.Errorf("clear socket directory: %w", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make socket directory: %w", err)
	}
	defer func() {
		if err != nil {
			d.close()
		}
	}()
	for _, socket := range []struct{ name, network string }{{controlSocket, "unix"}, {filesSocket, "unixpacket"}, {vsockSocket, "unix"}} {
		f, err := listen(filepath.Join(dir, socket.name), socket.network)
		if err != nil {
			return d, fmt.Errorf("make %s: %w", socket.name, err)
		}
		d = append(d, f)
	}
	kvm, err := os.OpenFile(s.KVM, os.O_RDWR, 0)
	if err != nil {
		return d, fmt.Errorf("open KVM: %w", err)
	}
	return append(d, kvm), nil
}

// listen returns a listening socket whose file at path is for this user alone and outlives it.
func listen(path, network string) (_ *os.File, err error) {
	l, err := net.ListenUnix(network, &net.UnixAddr{Name: path, Net: network})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)
	defer func() { err = errors.Join(err, l.Close()) }()
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, err
	}
	return l.File()
}

// close closes this process's copies.
func (d descriptors) close() {
	for _, f := range d {
		f.Close()
	}
}
