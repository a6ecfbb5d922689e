package vmproc

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// ErrGone says that the process looked for does not exist any more (or that its number belongs to another one now).
var ErrGone = errors.New("the VMM process is gone")

// Identity names one process for as long as the host is up.
type Identity struct {
	PID   int
	Start uint64 // start time in clock ticks since boot
	Boot  string // the kernel's boot id: the two numbers above mean nothing after a reboot
}

// Known reports whether the identity names a process at all.
func (i Identity) Known() bool { return i.PID > 0 }

// identify returns the identity of the living process pid.
func identify(pid int) (Identity, error) {
	start, err := startTime(pid)
	if err != nil {
		return Identity{}, err
	}
	boot, err := bootID()
	if err != nil {
		return Identity{}, err
	}
	return Identity{PID: pid, Start: start, Boot: boot}, nil
}

func bootID() (string, error) {
	raw, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the kernel's boot id: %w", err)
	}
	return strings.TrimSpace(string(raw)), nil
}

func startTime(pid int) (uint64, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if errors.Is(err, os.ErrNotExist) {
		return 0, ErrGone
	}
	if err != nil {
		return 0, fmt.Errorf("read the start time of process %d: %w", pid, err)
	}
	state, start, err := parseStat(raw)
	if err == nil && (state == 'Z' || state == 'X') {
		return 0, ErrGone // ended, and only not collected by its parent yet
	}
	return start, err
}

// parseStat returns fields 3 (state) and 22 (start time) of a /proc/PID/stat line. Field 2 is the command in parentheses and may hold anything, so the
// fields are counted from the last ")" (proc_pid_stat(5)).
func parseStat(raw []byte) (state byte, start uint64, err error) {
	end := bytes.LastIndexByte(raw, ')')
	if end < 0 {
		return 0, 0, fmt.Errorf("malformed stat line %q", raw)
	}
	fields := bytes.Fields(raw[end+1:]) // fields[0] is field 3
	if len(fields) < 20 {
		return 0, 0, fmt.Errorf("stat line with %d fields after the command", len(fields))
	}
	start, err = strconv.ParseUint(string(fields[19]), 10, 64)
	return fields[0][0], start, err
}

// Found is a torpor-vmm process seen in /proc.
type Found struct {
	Identity Identity
	Name     string // the directory below the run directory that holds its sockets
}

// scan lists the torpor-vmm processes whose sockets lie below runDir, whoever started them.
func scan(runDir string) ([]Found, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var found []Found
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		raw, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		if err != nil {
			continue // it ended, or is not ours to read
		}
		name, ok := machineOf(raw, runDir)
		if !ok {
			continue
		}
		if id, err := identify(pid); err == nil {
			found = append(found, Found{Identity: id, Name: name})
		}
	}
	return found, nil
}

// machineOf decides from a command line whether it is a VMM of runDir, and of which machine.
func machineOf(cmdline []byte, runDir string) (string, bool) {
	args := strings.Split(strings.TrimRight(string(cmdline), "\x00"), "\x00")
	if filepath.Base(args[0]) != binaryName {
		return "", false
	}
	for i, a := range args[:len(args)-1] {
		if a == machineFlag {
			dir := filepath.Clean(args[i+1])
			return filepath.Base(dir), filepath.Dir(dir) == filepath.Clean(runDir)
		}
	}
	return "", false
}
