package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Names of what a profile counts; each is reported per unit of the workload (MiB, round trip, request).
var profileCounters = []string{"exits", "mmio_exits", "halt_exits", "irq_injections", "switches", "vmm-ms", "vcpu-ms"}

// sample is what was counted up to one moment, by name.
type sample map[string]float64

// profiler counts what one VMM makes its host do.
type profiler struct {
	dir string // of KVM's counters
	pid int
}

func newProfiler(pid int) (*profiler, error) {
	dir, err := kvmCounters(pid)
	return &profiler{dir, pid}, err
}

// sample reads all counters: KVM's, and of every thread that works for the VMM, kernel threads included, how often it was
// switched away from and how long it ran. vCPU threads are told apart by the longest of all: the guest's own work is theirs.
func (p *profiler) sample() (sample, error) {
	s := sample{}
	for _, name := range profileCounters[:4] {
		n, err := readNumber(filepath.Join(p.dir, name))
		if err != nil {
			return nil, err
		}
		s[name] = n
	}
	threads, err := p.threads()
	if err != nil {
		return nil, err
	}
	var longest float64
	for _, dir := range threads {
		switches, ms, err := thread(dir)
		if err != nil {
			continue // it has ended
		}
		s["switches"] += switches
		s["vmm-ms"] += ms
		longest = max(longest, ms)
	}
	s["vcpu-ms"] = longest
	s["vmm-ms"] -= longest
	return s, nil
}

// threads are directories in /proc: of the process, and of the kernel threads named after it (vhost-PID).
func (p *profiler) threads() ([]string, error) {
	own, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/[0-9]*", p.pid))
	if err != nil || len(own) == 0 {
		return nil, fmt.Errorf("no threads of process %d: %w", p.pid, err)
	}
	all, err := filepath.Glob("/proc/[0-9]*")
	for _, dir := range all {
		comm, _ := os.ReadFile(filepath.Join(dir, "comm")) // it may have ended
		if strings.TrimSpace(string(comm)) == fmt.Sprintf("vhost-%d", p.pid) {
			own = append(own, dir)
		}
	}
	return own, err
}

// thread returns how often a thread was switched away from and how many milliseconds it ran.
func thread(dir string) (switches, ms float64, err error) {
	status, err := os.ReadFile(filepath.Join(dir, "status"))
	if err != nil {
		return 0, 0, err
	}
	for line := range strings.Lines(string(status)) {
		if name, value, _ := strings.Cut(line, ":"); strings.HasSuffix(name, "ctxt_switches") {
			n, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			if err != nil {
				return 0, 0, err
			}
			switches += n
		}
	}
	text, err := os.ReadFile(filepath.Join(dir, "schedstat"))
	if err != nil {
		return 0, 0, err
	}
	ran, _, _ := strings.Cut(string(text), " ")
	ns, err := strconv.ParseFloat(ran, 64)
	return switches, ns / 1e6, err
}

func readNumber(path string) (float64, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.ParseFloat(strings.TrimSpace(string(text)), 64)
}

// since is what was counted between two samples for each of n units.
func (s sample) since(before sample, n float64) string {
	var out []string
	for _, name := range profileCounters {
		out = append(out, fmt.Sprintf("%s %.2f", name, (s[name]-before[name])/n))
	}
	return strings.Join(out, ", ")
}

// profile returns a function that tells on standard error, for every figure that appears on the console of a machine, what its
// workload cost.
func profile(name string, pid int) (func(console string) error, error) {
	p, err := newProfiler(pid)
	if err != nil {
		return nil, err
	}
	last, err := p.sample()
	seen := 0
	return func(console string) error {
		whole := console[:strings.LastIndexByte(console, '\n')+1]
		figures, err := guestFigures(name, whole)
		if err != nil || len(figures) == seen {
			return err
		}
		now, err := p.sample()
		if err != nil {
			return err
		}
		f := figures[len(figures)-1]
		fmt.Fprintf(os.Stderr, "  %s %.1f %s, for each: %s\n", f.name, f.value, f.unit, now.since(last, f.amount))
		last, seen = now, len(figures)
		return nil
	}, err
}
