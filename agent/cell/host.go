package cell

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Check says in one sentence why this host or this process cannot have cells as in DefaultConfig; nil if it can.
func Check() error {
	_, err := check(DefaultConfig.Controllers)
	return err
}

// check returns where cgroup v2 is mounted.
func check(controllers []string) (string, error) {
	if os.Geteuid() != 0 {
		return "", errors.New("microVMs are jailed, which takes root: run as root")
	}
	mounts, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", fmt.Errorf("find cgroup v2: %w", err)
	}
	defer mounts.Close()
	root := ""
	for lines := bufio.NewScanner(mounts); lines.Scan() && root == ""; {
		root = cgroup2Mount(lines.Text())
	}
	if root == "" {
		return "", errors.New("cgroup v2 is not mounted, and microVMs are limited by it: mount it (mount -t cgroup2 none /sys/fs/cgroup)")
	}
	has, err := words(filepath.Join(root, "cgroup.controllers"))
	if err != nil {
		return "", err
	}
	for _, c := range controllers {
		if !slices.Contains(has, c) {
			return "", fmt.Errorf("the cgroup v2 at %s lacks the controller %s, and microVMs are limited by it: "+
				"boot with systemd.unified_cgroup_hierarchy=1, or delegate it to this container", root, c)
		}
	}
	return root, nil
}

// cgroup2Mount returns the mount point if a line of /proc/self/mountinfo is about a whole cgroup v2 (proc_pid_mountinfo(5):
// the fourth field is the mounted directory, the fifth the mount point; the type comes after a dash). A point with blanks or
// other characters that are escaped there is none to us.
func cgroup2Mount(line string) string {
	before, after, ok := strings.Cut(line, " - ")
	fields := strings.Fields(before)
	if !ok || len(fields) < 5 || fields[3] != "/" || !strings.HasPrefix(after, "cgroup2 ") || strings.Contains(fields[4], `\`) {
		return ""
	}
	return fields[4]
}

func words(path string) ([]string, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return strings.Fields(string(raw)), nil
}

// delegate makes the cgroup at path below root, with the controllers for those in it.
func delegate(root, path string, controllers []string) error {
	dir := root
	for _, name := range append(strings.Split(filepath.Clean(path), "/"), "") {
		if err := enable(dir, controllers); err != nil {
			return fmt.Errorf("enable the controllers of cgroup %s: %w", dir, err)
		}
		if name == "" {
			break
		}
		dir = filepath.Join(dir, name)
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return fmt.Errorf("make the parent cgroup: %w", err)
		}
	}
	return nil
}

// leaf is where this process moves when its own cgroup is to have others in it.
const leaf = "torpor-agent"

// enable gives the cgroups below dir their controllers. A cgroup that does so may have no processes itself, the root of all
// excepted (the kernel's Documentation/admin-guide/cgroup-v2.rst, "No Internal Process Constraint"); if it is this process
// that is in the way, it moves.
func enable(dir string, controllers []string) error {
	control := filepath.Join(dir, "cgroup.subtree_control")
	has, err := words(control)
	if err != nil {
		return err
	}
	var add []string
	for _, c := range controllers {
		if !slices.Contains(has, c) {
			add = append(add, "+"+c)
		}
	}
	if len(add) == 0 {
		return nil
	}
	line := strings.Join(add, " ")
	err = write(control, line)
	if !errors.Is(err, unix.EBUSY) {
		return err
	}
	own := filepath.Join(dir, leaf)
	if err := os.Mkdir(own, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	inside, err := words(filepath.Join(dir, "cgroup.procs"))
	if err != nil {
		return err
	}
	if !slices.Contains(inside, fmt.Sprint(os.Getpid())) {
		return errors.Join(fmt.Errorf("other processes are in it: %w", unix.EBUSY), os.Remove(own))
	}
	if err := write(filepath.Join(own, "cgroup.procs"), "0"); err != nil {
		return err
	}
	if err := write(control, line); err != nil {
		return fmt.Errorf("other processes are in it: start the agent in a cgroup of its own, or name another with --cgroup: %w", err)
	}
	return nil
}

// write writes a value to a file of a cgroup, which must exist.
func write(path, value string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}
