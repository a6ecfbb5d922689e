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
	s, err := readStat(pid)
	return s.start, err
}

// stat is what is wanted of /proc/PID/stat.
type stat struct {
	state  byte   // field 3
	parent int    // field 4
	start  uint64 // field 22, clock ticks since boot
}

// readStat is ErrGone for a process that has ended, and only was not collected by its parent yet.
func readStat(pid int) (stat, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if errors.Is(err, os.ErrNotExist) {
		return stat{}, ErrGone
	}
	if err != nil {
		return stat{}, fmt.Errorf("read the state of process %d: %w", pid, err)
	}
	s, err := parseStat(raw)
	if err == nil && (s.state == 'Z' || s.state == 'X') {
		err = ErrGone
	}
	return s, err
}

// parseStat parses a /proc/PID/stat line. Field 2 is the command in parentheses and may hold anything, so the fields are counted from the last ")"
// (proc_pid_stat(5)).
func parseStat(raw []byte) (s stat, err error) {
	end := bytes.LastIndexByte(raw, ')')
	if end < 0 {
		return s, fmt.Errorf("malformed stat line %q", raw)
	}
	fields := bytes.Fields(raw[end+1:]) // fields[0] is field 3
	if len(fields) < 20 {
		return s, fmt.Errorf("stat line with %d fields after the command", len(fields))
	}
	s.state = fields[0][0]
	var errs [2]error
	s.parent, errs[0] = strconv.Atoi(string(fields[1]))
	s.start, errs[1] = strconv.ParseUint(string(fields[19]), 10, 64)
	return s, errors.Join(errs[:]...)
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
		name, ok := machineRunBy(pid, runDir)
		if !ok || isView(pid, name, runDir) {
			continue
		}
		if id, err := identify(pid); err == nil {
			found = append(found, Found{Identity: id, Name: name})
		}
	}
	return found, nil
}

// machineRunBy returns the machine of process pid, if it is a VMM of runDir.
func machineRunBy(pid int, runDir string) (string, bool) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return "", false // it ended, or is not ours to read
	}
	return machineOf(raw, runDir)
}

// isView tells a view of a VMM's memory (vmm/memview) from the VMM: it is a child of it and has its command line. It ends with
// its parent.
func isView(pid int, name, runDir string) bool {
	s, err := readStat(pid)
	if err != nil {
		return false
	}
	parents, ok := machineRunBy(s.parent, runDir)
	return ok && parents == name
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
