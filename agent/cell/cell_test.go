package cell

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The test binary is also what lives in a cell, until its input ends; and the agent that is in its own way.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == "inhabitant" {
		_, _ = os.Stdin.Read(make([]byte, 1))
		return
	}
	if len(os.Args) == 3 && os.Args[1] == "reader" {
		if err := touchAll(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if len(os.Args) == 3 && os.Args[1] == "agent" {
		_, err := Open(Config{Parent: os.Args[2], FirstUID: 1_950_100_000, UIDs: 1, Controllers: DefaultConfig.Controllers})
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// testParent makes cells below a parent of the test's own, with the controllers this host has.
func testCells(t *testing.T, uids int) *Cells {
	t.Helper()
	cfg := Config{Parent: fmt.Sprintf("torpor-test-%d/%s", os.Getpid(), t.Name()), FirstUID: 1_950_000_000, UIDs: uids}
	if Check() == nil {
		cfg.Controllers = DefaultConfig.Controllers
	}
	if _, err := check(nil); err != nil {
		t.Skipf("needs root and cgroup v2: %v", err)
	}
	c, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(os.Remove(c.parent()), os.Remove(filepath.Dir(c.parent()))); err != nil {
			t.Errorf("left behind: %v", err)
		}
	})
	return c
}

func needControllers(t *testing.T) {
	t.Helper()
	if err := Check(); err != nil {
		t.Skip(err)
	}
}

// inhabitant is a process in a cell.
type inhabitant struct {
	*Cell
	cmd *exec.Cmd
	out interface{ Close() error }
}

func inhabit(t *testing.T, c *Cells) inhabitant {
	t.Helper()
	var i inhabitant
	cell, err := c.Start(func(_ int, cgroup *os.File) error {
		i.cmd = exec.Command(os.Args[0], "inhabitant")
		stdin, err := i.cmd.StdinPipe()
		if err != nil {
			return err
		}
		i.out = stdin
		i.cmd.SysProcAttr = &unix.SysProcAttr{UseCgroupFD: true, CgroupFD: int(cgroup.Fd())}
		return i.cmd.Start()
	})
	if err != nil {
		t.Fatal(err)
	}
	i.Cell = cell
	return i
}

func (i inhabitant) end(t *testing.T) {
	t.Helper()
	i.out.Close()
	if err := i.cmd.Wait(); err != nil {
		t.Error(err)
	}
}

func bounded(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func TestNoTwoLivingShareAUser(t *testing.T) {
	c := testCells(t, 2)
	other, err := Open(c.cfg) // a second agent, or the same after a restart
	if err != nil {
		t.Fatal(err)
	}
	a, b := inhabit(t, c), inhabit(t, other)
	if a.UID() == b.UID() {
		t.Errorf("both have user %d", a.UID())
	}
	if _, err := c.Start(func(int, *os.File) error { t.Error("started"); return nil }); !errors.Is(err, ErrNone) {
		t.Errorf("a third of two: %v", err)
	}
	if found, err := other.Of(a.cmd.Process.Pid); err != nil || found.UID() != a.UID() {
		t.Errorf("found %v, %v", found, err)
	}
	if _, err := c.Of(os.Getpid()); err == nil {
		t.Error("this process is in a cell")
	}
	// A restart sweeps nobody out who lives, and everybody who does not.
	a.end(t)
	if err := a.waitEmpty(bounded(t)); err != nil {
		t.Fatal(err)
	}
	again, err := Open(c.cfg)
	if err != nil {
		t.Fatal(err)
	}
	reused := inhabit(t, again)
	if reused.UID() != a.UID() {
		t.Errorf("user %d is free, got %d", a.UID(), reused.UID())
	}
	if err := a.Remove(bounded(t)); err != nil {
		t.Errorf("a cell that was swept: %v", err)
	}
	if _, err := again.Of(reused.cmd.Process.Pid); err != nil {
		t.Errorf("the next one's cell was removed with it: %v", err)
	}
	for _, i := range []inhabitant{b, reused} {
		i.end(t)
		if err := i.Remove(bounded(t)); err != nil {
			t.Error(err)
		}
	}
}

func TestRemoveWaitsForTheLastProcess(t *testing.T) {
	c := testCells(t, 1)
	i := inhabit(t, c)
	short, cancel := context.WithTimeout(bounded(t), 50*time.Millisecond)
	defer cancel()
	if err := i.Remove(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("removed, or not for want of time: %v", err)
	}
	removed := make(chan error, 1)
	go func() { removed <- i.Remove(bounded(t)) }()
	i.end(t)
	if err := <-removed; err != nil {
		t.Error(err)
	}
}

func TestAStartThatFailsLeavesNoCell(t *testing.T) {
	c := testCells(t, 1)
	broken := errors.New("broken")
	for range 3 {
		if _, err := c.Start(func(int, *os.File) error { return broken }); !errors.Is(err, broken) {
			t.Fatal(err)
		}
	}
}

func TestManyAtOnce(t *testing.T) {
	c := testCells(t, 20)
	var mu sync.Mutex
	users := map[int]bool{}
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			cell, err := c.Start(func(uid int, _ *os.File) error {
				mu.Lock()
				defer mu.Unlock()
				if users[uid] {
					t.Errorf("user %d was given twice", uid)
				}
				users[uid] = true
				return nil
			})
			if err != nil {
				t.Error(err)
				return
			}
			t.Cleanup(func() {
				if err := cell.Remove(bounded(t)); err != nil {
					t.Error(err)
				}
			})
		})
	}
	all.Wait()
}

func TestLimitsAreSet(t *testing.T) {
	needControllers(t)
	c := testCells(t, 1)
	i := inhabit(t, c)
	read := func(file string) string {
		raw, err := os.ReadFile(filepath.Join(i.dir(), file))
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(raw))
	}
	if got := read("cpu.max"); got != "200000 100000" {
		t.Errorf("before there is a machine: cpu.max %s", got)
	}
	if err := i.Limit(1<<30, 4); err != nil {
		t.Error(err)
	}
	for file, want := range map[string]string{"cpu.max": "500000 100000", "memory.max": fmt.Sprint(memoryMax(1 << 30)), "pids.max": "512"} {
		if got := read(file); got != want {
			t.Errorf("%s is %s, want %s", file, got, want)
		}
	}
	i.end(t)
	if err := i.Remove(bounded(t)); err != nil {
		t.Error(err)
	}
}

// touchAll reads every page of a file through a private mapping, as a machine reads the memory of its template.
func touchAll(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	b, err := unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		return err
	}
	var sum byte
	for range 2 {
		for off := 0; off < len(b); off += 4096 {
			sum += b[off]
		}
	}
	if sum != 0 {
		return errors.New("the file is not what was written")
	}
	return nil
}

// The first microVM of a template is charged for all that it reads of it, which may be more than it is allowed: it must live.
func TestPageCacheDoesNotKill(t *testing.T) {
	needControllers(t)
	const limit, size = 32 << 20, 96 << 20
	path := filepath.Join(t.TempDir(), "base")
	var fs unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(path), &fs); err != nil || fs.Type == unix.TMPFS_MAGIC {
		t.Skipf("needs a disk for temporary files (TMPDIR), not memory: %v", err)
	}
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	chunk := make([]byte, 1<<20)
	for n := 0; n < size && err == nil; n += len(chunk) {
		_, err = f.Write(chunk)
	}
	// Out of the cache, where it is charged to this test.
	if err := errors.Join(err, f.Sync(), unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)); err != nil {
		t.Fatal(err)
	}
	c := testCells(t, 1)
	var said bytes.Buffer
	cmd := exec.Command(os.Args[0], "reader", path)
	cmd.Stderr = &said
	cell, err := c.Start(func(uid int, cgroup *os.File) error {
		if err := write(filepath.Join(c.dir(uid), "memory.max"), fmt.Sprint(limit)); err != nil {
			return err
		}
		cmd.SysProcAttr = &unix.SysProcAttr{UseCgroupFD: true, CgroupFD: int(cgroup.Fd())}
		return cmd.Start()
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v: %s", err, &said)
	}
	events, err := words(filepath.Join(cell.dir(), "memory.events"))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(events); i += 2 {
		switch n := events[i+1]; {
		case events[i] == "max" && n == "0":
			t.Error("the limit was never reached: the test proves nothing")
		case strings.HasPrefix(events[i], "oom") && n != "0":
			t.Errorf("%s %s", events[i], n)
		}
	}
	if err := cell.Remove(bounded(t)); err != nil {
		t.Error(err)
	}
}

// An agent may be started in a cgroup that has no other process and is to be the parent's parent, as in a container.
func TestAnAgentInAnotherCgroupMovesOutOfTheWay(t *testing.T) {
	needControllers(t)
	c := testCells(t, 1)
	dir := filepath.Join(c.parent(), "delegated")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	cgroup, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer cgroup.Close()
	parent := filepath.Join(c.cfg.Parent, "delegated/inner")
	run := func() (string, error) {
		var complaint bytes.Buffer
		cmd := exec.Command(os.Args[0], "agent", parent)
		cmd.Stderr = &complaint
		cmd.SysProcAttr = &unix.SysProcAttr{UseCgroupFD: true, CgroupFD: int(cgroup.Fd())}
		err := cmd.Run()
		return complaint.String(), err
	}
	stranger := exec.Command(os.Args[0], "inhabitant")
	stdin, err := stranger.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stranger.SysProcAttr = &unix.SysProcAttr{UseCgroupFD: true, CgroupFD: int(cgroup.Fd())}
	if err := stranger.Start(); err != nil {
		t.Fatal(err)
	}
	if said, err := run(); err == nil || !strings.Contains(said, "other processes") {
		t.Errorf("with a stranger in it: %q, %v", said, err)
	}
	stdin.Close()
	if err := stranger.Wait(); err != nil {
		t.Error(err)
	}
	if said, err := run(); err != nil {
		t.Errorf("alone in it: %q, %v", said, err)
	}
	for _, left := range []string{"inner", leaf, "."} {
		if err := os.Remove(filepath.Join(dir, left)); err != nil {
			t.Error(err)
		}
	}
}

func TestCheckSaysWhy(t *testing.T) {
	for line, want := range map[string]string{
		"30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw": "/sys/fs/cgroup",
		"30 23 0:26 /a /sys/fs/cgroup rw - cgroup2 cgroup2 rw":                "", // a part of one
		"30 23 0:26 / /sys/fs/cgroup rw - cgroup cgroup rw,cpu":               "", // version 1
		`30 23 0:26 / /a\040b rw - cgroup2 none rw`:                           "",
		"30 23 0:26": "",
		"":           "",
	} {
		if got := cgroup2Mount(line); got != want {
			t.Errorf("%q: got %q, want %q", line, got, want)
		}
	}
	if os.Geteuid() != 0 {
		if err := Check(); err == nil || !strings.Contains(err.Error(), "root") {
			t.Errorf("not root: %v", err)
		}
		return
	}
	if _, err := check(nil); err != nil {
		t.Skip(err)
	}
	if _, err := check([]string{"no-such-controller"}); err == nil || !strings.Contains(err.Error(), "no-such-controller") {
		t.Errorf("a controller that there is not: %v", err)
	}
}

func TestConfig(t *testing.T) {
	if err := DefaultConfig.validate(); err != nil {
		t.Error(err)
	}
	for _, c := range []Config{
		{Parent: "", FirstUID: 1, UIDs: 1},
		{Parent: "/torpor", FirstUID: 1, UIDs: 1},
		{Parent: "../torpor", FirstUID: 1, UIDs: 1},
		{Parent: "a/../b", FirstUID: 1, UIDs: 1},
		{Parent: "torpor", FirstUID: 0, UIDs: 1},
		{Parent: "torpor", FirstUID: 1, UIDs: 0},
		{Parent: "torpor", FirstUID: 1<<31 - 5, UIDs: 10},
	} {
		if err := c.validate(); err == nil {
			t.Errorf("%+v was taken", c)
		}
	}
}

// The room beyond what cannot be reclaimed is what keeps page cache from killing.
func TestMemoryLimitLeavesRoom(t *testing.T) {
	for _, guest := range []uint64{0, 128 << 20, 512 << 20, 4 << 30, 16 << 30} {
		tables := guest / 64
		if room := memoryMax(guest) - 2*guest - tables; room < 300<<20 {
			t.Errorf("a guest of %d MiB leaves %d MiB", guest>>20, room>>20)
		}
	}
}
