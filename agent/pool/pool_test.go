package pool_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"torpor/agent/pool"
	"torpor/agent/timing"
	"torpor/agent/vmproc"
	"torpor/api/apierr"
	"torpor/api/vmmpb"
)

// supervisor starts real VMMs, outside jails.
func supervisor(t *testing.T) *vmproc.Supervisor {
	t.Helper()
	dev, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("needs /dev/kvm: %v", err)
	}
	dev.Close()
	dir, err := os.MkdirTemp("", "pool") //nolint:usetesting // sockets need a short path, and the test framework makes long ones
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	binary := filepath.Join(dir, "torpor-vmm")
	cmd := exec.Command("go", "build", "-o", binary, "torpor/vmm")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Skipf("needs the go command: %v: %s", err, out)
	}
	s := &vmproc.Supervisor{Binary: binary, RunDir: filepath.Join(dir, "vm"), KVM: "/dev/kvm"}
	if err := os.Mkdir(s.RunDir, 0o700); err != nil {
		t.Fatal(err)
	}
	return s
}

func open(t *testing.T, s *vmproc.Supervisor, size int) *pool.Pool {
	t.Helper()
	budgets, err := timing.New(10)
	if err != nil {
		t.Fatal(err)
	}
	budgets.PoolRefill = time.Millisecond
	p := pool.New(context.Background(), pool.Config{VMMs: s, Size: size, VCPUs: 1, Budgets: budgets, Log: zerolog.New(zerolog.NewTestWriter(t))})
	t.Cleanup(p.Close)
	if err := p.Fill(); err != nil {
		t.Fatal(err)
	}
	return p
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("gave up waiting until %s", what)
		}
	}
}

func full(t *testing.T, p *pool.Pool, size int) {
	t.Helper()
	eventually(t, "the pool is full", func() bool { return p.Ready() == size })
}

func living(t *testing.T, s *vmproc.Supervisor) []vmproc.Found {
	t.Helper()
	all, err := s.Scan()
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func has(all []vmproc.Found, id vmproc.Identity) bool {
	return slices.ContainsFunc(all, func(f vmproc.Found) bool { return f.Identity == id })
}

func start(t *testing.T, p *pool.Pool, name string) *vmproc.Process {
	t.Helper()
	vm, err := p.Start(t.Context(), name, filepath.Join(t.TempDir(), "vmm.log"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = vm.Kill(context.Background()) })
	return vm
}

// prepared says whether a VMM has what the pool makes ready: it is refused a second time.
func prepared(t *testing.T, vm *vmproc.Process) bool {
	t.Helper()
	_, err := vm.Prepare(t.Context(), &vmmpb.PrepareRequest{Vcpus: 1})
	return errors.Is(err, &apierr.Error{Code: apierr.AlreadyRunning})
}

func TestPoolHandsOutAndRefills(t *testing.T) {
	s := supervisor(t)
	p := open(t, s, 2)
	full(t, p, 2)
	before := living(t, s)
	vm := start(t, p, "one")
	if !has(before, vm.Identity()) || !prepared(t, vm) {
		t.Errorf("process %d is not of the pool %v", vm.Identity().PID, before)
	}
	full(t, p, 2)
	if n := len(living(t, s)); n != 3 {
		t.Errorf("%d processes, want one that is used and two that wait", n)
	}
	again, err := s.Adopt(t.Context(), "one", vm.Identity()) // by the sockets of its own directory
	if err != nil {
		t.Fatal(err)
	}
	again.Detach()
	if long := start(t, p, strings.Repeat("x", 40)); prepared(t, long) {
		t.Error("a name that does not fit was given to a process of the pool")
	}
}

func TestPoolOutlivesItsProcesses(t *testing.T) {
	s := supervisor(t)
	p := open(t, s, 2)
	full(t, p, 2)
	for _, f := range living(t, s) {
		if err := s.End(t.Context(), f.Identity); err != nil {
			t.Fatal(err)
		}
	}
	vm := start(t, p, "one")
	if _, err := vm.Status(t.Context(), &vmmpb.StatusRequest{}); err != nil {
		t.Error(err)
	}
	full(t, p, 2)
}

func TestPoolLeavesNothing(t *testing.T) {
	s := supervisor(t)
	p := open(t, s, 2)
	full(t, p, 2)
	p.Close()
	if left := living(t, s); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}

	// An agent that is killed leaves its pool to the next one, which ends whom nobody owns before it fills its own.
	killed := open(t, s, 1)
	full(t, killed, 1)
	stray := living(t, s)[0]
	if err := s.End(t.Context(), stray.Identity); err != nil {
		t.Fatal(err)
	}
	next := open(t, s, 1)
	full(t, next, 1)
	if _, err := os.Stat(s.Dir(stray.Name)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory of the stray: %v", err)
	}
	next.Close()
	killed.Close()
	if left, _ := os.ReadDir(s.RunDir); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestNoPool(t *testing.T) {
	s := supervisor(t)
	p := open(t, s, 0)
	if vm := start(t, p, "one"); prepared(t, vm) {
		t.Error("a pool of none had one")
	}
	if n := len(living(t, s)); n != 1 {
		t.Errorf("%d processes", n)
	}
}
