package main

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"torpor/agent/disk"
	"torpor/api/agentpb"
	"torpor/api/id"
)

const kvmDevice = "/dev/kvm"

// checkKVM says in one sentence what is wrong with /dev/kvm.
func checkKVM(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s is missing: load kvm_intel or kvm_amd (or run `torpor up`, which emulates a host where there is no KVM)", path)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%s may not be opened: run as root or join the group kvm", path)
	case err != nil:
		return fmt.Errorf("%s cannot be used: %w", path, err)
	}
	return f.Close()
}

// checkRoom refuses to start on a full data disk: nothing could be created, and no sandbox could be put to sleep.
func checkRoom(dir string, reserveMiB uint64) error {
	free, err := disk.Layers{}.Free(dir)
	if err != nil {
		return fmt.Errorf("how much room %s has is unknown: %w", dir, err)
	}
	if free>>20 < reserveMiB {
		return fmt.Errorf("the disk of %s is full (%d MiB free, %d needed): free some space or choose another --data", dir, free>>20, reserveMiB)
	}
	return nil
}

// lockData takes the data directory for this process; the lock ends with it.
func lockData(dir string) (*os.File, error) {
	path := filepath.Join(dir, "lock")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the data directory: %w", err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = fmt.Errorf("%s is in use by another torpor-agent: stop it or choose another --data", dir)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// listen opens a unix socket. A socket that nobody answers on was left by an agent that was killed.
func listen(path string) (net.Listener, error) {
	if conn, err := net.DialTimeout("unix", path, time.Second); err == nil {
		conn.Close()
		return nil, fmt.Errorf("the socket %s is in use: stop the program behind it or choose another --run", path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("remove the stale socket: %w", err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// nodeID returns the chosen name, or the one made at the first start.
func nodeID(cfg config) (string, error) {
	if cfg.NodeID != "" {
		return cfg.NodeID, nil
	}
	path := filepath.Join(cfg.Data, "node-id")
	raw, err := os.ReadFile(path)
	if err == nil && len(strings.TrimSpace(string(raw))) > 0 {
		return strings.TrimSpace(string(raw)), nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("read the node's name: %w", err)
	}
	name := "node-" + id.NewSandbox()[1:9]
	if err := os.WriteFile(path, []byte(name+"\n"), 0o600); err != nil {
		return "", fmt.Errorf("keep the node's name: %w", err)
	}
	return name, nil
}

// about describes this host.
func about(cfg config, gatewaySocket string) (*agentpb.NodeResponse, error) {
	name, err := nodeID(cfg)
	if err != nil {
		return nil, err
	}
	node := &agentpb.NodeResponse{NodeId: name, Version: version, GatewaySocket: gatewaySocket}
	for _, module := range []string{"kvm_intel", "kvm_amd", "kvm_pvm"} {
		if _, err := os.Stat("/sys/module/" + module); err == nil {
			node.Kvm = module
		}
	}
	cpuinfo, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return nil, fmt.Errorf("read the processor's name: %w", err)
	}
	node.Emulated = strings.Contains(string(cpuinfo), "QEMU TCG") // the model name under QEMU's software emulation
	return node, nil
}
