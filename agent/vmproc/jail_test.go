package vmproc

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"torpor/agent/cell"
	"torpor/api/vmmpb"
)

var rounds = flag.Int("rounds", 50, "how many VMMs TestStartsAndKillsLeaveNothing starts and kills")

// installed is where a host has the VMM, if it has one.
const installed = "/usr/lib/torpor/bin/torpor-vmm"

// realVMM is the program itself.
func realVMM(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), binaryName)
	build := exec.Command("go", "build", "-o", program, "torpor/vmm")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		if _, err := os.Stat(installed); err != nil {
			t.Skip("needs torpor-vmm, or the go command to build it")
		}
		return installed
	}
	if err != nil {
		t.Fatalf("build torpor-vmm: %v\n%s", err, out)
	}
	return program
}

// jailer is a supervisor of jailed VMMs. They have the limits that this host has controllers for.
func jailer(t *testing.T) *Supervisor {
	t.Helper()
	cfg := cell.Config{Parent: fmt.Sprintf("torpor-test-%d", os.Getpid()), FirstUID: 1_950_300_000, UIDs: 2}
	if cell.Check() == nil {
		cfg.Controllers = cell.DefaultConfig.Controllers
	}
	if f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0); err != nil {
		t.Skipf("needs KVM: %v", err)
	} else {
		f.Close()
	}
	cells, err := cell.Open(cfg)
	if err != nil {
		t.Skipf("needs root and cgroup v2: %v", err)
	}
	t.Cleanup(func() {
		if err := os.Remove(parentCgroup(t, cfg)); err != nil {
			t.Errorf("cells are left: %v", err)
		}
	})
	return &Supervisor{Binary: realVMM(t), RunDir: runDir(t), KVM: "/dev/kvm", Cells: cells}
}

func parentCgroup(t *testing.T, cfg cell.Config) string {
	t.Helper()
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		if dir := filepath.Join(root, cfg.Parent); exists(dir) {
			return dir
		}
	}
	t.Fatalf("there is no cgroup %s", cfg.Parent)
	return ""
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func TestAVMMIsJailed(t *testing.T) {
	s := jailer(t)
	p := start(t, s, "i1")
	if st, err := p.Status(bounded(t), &vmmpb.StatusRequest{}); err != nil || st.State != "idle" {
		t.Fatalf("status %v, %v", st, err)
	}
	status, err := os.ReadFile("/proc/" + itoa(p.Identity().PID) + "/status")
	if err != nil {
		t.Fatal(err)
	}
	uid := strconv.Itoa(p.cell.UID())
	for _, want := range []string{"Uid:\t" + uid + "\t", "Gid:\t" + uid + "\t", "CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"} {
		if !strings.Contains(string(status), want) {
			t.Errorf("no %q in\n%s", want, status)
		}
	}
	if calm := calmThreads(t, p.Identity().PID); len(calm) != 1 || calm[0] == p.Identity().PID {
		t.Errorf("threads %v of process %d sleep longer, want its monitor to", calm, p.Identity().PID)
	}
	// An agent that comes later finds the process and the cell it is in.
	p.Detach()
	found, err := s.Scan()
	if err != nil || len(found) != 1 || found[0].Name != "i1" || found[0].Identity != p.Identity() {
		t.Fatalf("found %v, %v", found, err)
	}
	later := &Supervisor{Binary: s.Binary, RunDir: s.RunDir, KVM: s.KVM, Cells: s.Cells}
	adopted, err := later.Adopt(bounded(t), "i1", p.Identity())
	if err != nil {
		t.Fatal(err)
	}
	if adopted.cell == nil || adopted.cell.UID() != p.cell.UID() {
		t.Errorf("its cell is %v", adopted.cell)
	}
	if err := adopted.Kill(bounded(t)); err != nil {
		t.Error(err)
	}
}

// calmThreads are the threads of a process whose sleeps may be longer.
func calmThreads(t *testing.T, pid int) (calm []int) {
	t.Helper()
	threads, err := os.ReadDir("/proc/" + itoa(pid) + "/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, thread := range threads {
		slack, err := os.ReadFile("/proc/" + thread.Name() + "/timerslack_ns")
		if err != nil {
			t.Fatal(err)
		}
		if strings.TrimSpace(string(slack)) == itoa(int(monitorSlack)) {
			id, _ := strconv.Atoi(thread.Name())
			calm = append(calm, id)
		}
	}
	return calm
}

func TestAJailThatCannotBeEnteredSaysWhy(t *testing.T) {
	s := jailer(t)
	if err := os.Chmod(s.Binary, 0o700); err != nil {
		t.Fatal(err)
	}
	if s.Binary == installed {
		defer os.Chmod(s.Binary, 0o755)
	}
	log := filepath.Join(t.TempDir(), "log")
	if _, err := s.Start(bounded(t), "i1", log); err == nil {
		t.Error("a program that its user cannot read was run")
	}
	if said, err := os.ReadFile(log); err != nil || !strings.Contains(string(said), "everybody must be able to read") {
		t.Errorf("it said %q, %v", said, err)
	}
}

// counts is what a host could run out of.
func counts(t *testing.T, s *Supervisor) map[string]int {
	t.Helper()
	c := map[string]int{}
	for what, dir := range map[string]string{"descriptors": "/proc/self/fd", "socket directories": s.RunDir} {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		c[what] = len(entries)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	c["mounts"] = strings.Count(string(mounts), "\n")
	found, err := s.Scan()
	if err != nil {
		t.Fatal(err)
	}
	c["processes"] = len(found)
	return c
}

// threads may grow by what the Go runtime finds useful, but not with the rounds.
const threadSlack = 8

func threads(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// That no cell is left is checked by jailer.
func TestStartsAndKillsLeaveNothing(t *testing.T) {
	s, log := jailer(t), filepath.Join(t.TempDir(), "log")
	round := func(i int) {
		t.Helper()
		p, err := s.Start(bounded(t), "i1", log)
		if err != nil {
			t.Fatalf("round %d: %v", i, err)
		}
		if err := errors.Join(p.Kill(bounded(t)), s.Clear("i1")); err != nil {
			t.Fatalf("round %d: %v", i, err)
		}
	}
	for i := range 5 {
		round(i) // what the runtime makes once
	}
	before, threadsBefore := counts(t, s), threads(t)
	for i := range *rounds {
		round(i)
	}
	more := func() (found []string) {
		for what, n := range counts(t, s) {
			if n > before[what] {
				found = append(found, fmt.Sprintf("%s: %d before, %d after %d rounds", what, before[what], n, *rounds))
			}
		}
		return found
	}
	for end := bounded(t); len(more()) > 0 && end.Err() == nil; runtime.Gosched() {
		continue // a connection is closed by its own goroutine, in its own time
	}
	for _, what := range more() {
		t.Error(what)
	}
	if n := threads(t); n > threadsBefore+threadSlack {
		t.Errorf("threads: %d before, %d after %d rounds", threadsBefore, n, *rounds)
	}
}
