package pid1

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"golang.org/x/sys/unix"
)

// patience bounds a test that hangs.
const patience = 60 * time.Second

// inChild runs a test in a process of its own, which is the reaper of all it starts, as PID 1 is.
func inChild(t *testing.T, body func()) {
	t.Helper()
	if os.Getenv("PID1_TEST") == t.Name() {
		if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
			t.Fatal(err)
		}
		body()
		return
	}
	cmd := exec.Command("/proc/self/exe", "-test.run", "^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), "PID1_TEST="+t.Name())
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

func attr() *syscall.ProcAttr {
	return &syscall.ProcAttr{Env: os.Environ(), Files: []uintptr{0, 1, 2}}
}

func TestReaper(t *testing.T) {
	inChild(t, func() {
		children := make(chan os.Signal, 1)
		signal.Notify(children, unix.SIGCHLD)
		r := newReaper()
		stop := make(chan struct{})
		defer close(stop)
		go r.run(children, stop)

		// Many at once, each with its own status.
		statuses := map[int]<-chan unix.WaitStatus{}
		for code := range 50 {
			_, status, err := r.start("/bin/sh", []string{"sh", "-c", fmt.Sprintf("exit %d", code)}, attr())
			if err != nil {
				t.Fatal(err)
			}
			statuses[code] = status
		}
		for code, status := range statuses {
			select {
			case s := <-status:
				if s.ExitStatus() != code || describe(s) != fmt.Sprintf("exit status %d", code) {
					t.Errorf("status %v of exit %d", s, code)
				}
			case <-time.After(patience):
				t.Fatalf("no status of exit %d", code)
			}
		}

		// Orphans of a child come to us and are reaped too.
		pid, status, err := r.start("/bin/sh", []string{"sh", "-c", "for i in 1 2 3 4 5; do sleep 0.1 & done; kill -9 $$"}, attr())
		if err != nil {
			t.Fatal(err)
		}
		if s := <-status; !s.Signaled() || describe(s) != "signal: killed" {
			t.Errorf("status %v", s)
		}
		if !r.emptied(patience) {
			t.Error("orphans were not reaped")
		}
		if err := unix.Kill(pid, 0); !errors.Is(err, unix.ESRCH) {
			t.Errorf("a zombie is left: %v", err)
		}
		if _, _, err := r.start("/no/such", []string{"x"}, attr()); err == nil {
			t.Error("started what is not there")
		}
	})
}

func TestEmptiedGivesUp(t *testing.T) {
	inChild(t, func() {
		r := newReaper()
		pid, _, err := r.start("/bin/sleep", []string{"sleep", "600"}, attr())
		if err != nil {
			t.Fatal(err)
		}
		if r.emptied(10 * time.Millisecond) {
			t.Error("a running child counts as none")
		}
		_ = unix.Kill(pid, unix.SIGKILL)
	})
}

// The daemon is started again however it dies, says hello once, and its supervisor stops when asked.
func TestSupervisor(t *testing.T) {
	if mark := os.Getenv("PID1_DAEMON"); mark != "" && os.Getenv("PID1_TEST") == "" {
		daemon(mark)
	}
	inChild(t, func() {
		mark := filepath.Join(t.TempDir(), "starts")
		children := make(chan os.Signal, 1)
		signal.Notify(children, unix.SIGCHLD)
		r := newReaper()
		go r.run(children, nil)
		p := &PID1{
			Path: os.Getenv("PATH"), Args: []string{"-test.run=^TestSupervisor$"}, Hello: "hello", Log: zerolog.Nop(),
			environ: []string{"PID1_DAEMON=" + mark},
		}
		stop, over := make(chan os.Signal), make(chan struct{})
		go func() {
			p.supervise(r, stop)
			close(over)
		}()
		deadline := time.After(patience)
		for lines := 0; lines < 3; {
			raw, _ := os.ReadFile(mark)
			lines = strings.Count(string(raw), "\n")
			select {
			case <-time.After(10 * time.Millisecond):
			case <-deadline:
				t.Fatalf("started only so often: %q", raw)
			}
		}
		stop <- unix.SIGTERM
		<-over
		raw, _ := os.ReadFile(mark)
		if !strings.HasPrefix(string(raw), "hello\nagain\nagain\n") {
			t.Errorf("starts %q", raw)
		}
	})
}

// daemon plays a daemon that dies at once.
func daemon(mark string) {
	f, err := os.OpenFile(mark, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		os.Exit(9)
	}
	word := "again"
	if os.Args[len(os.Args)-1] == "hello" {
		word = "hello"
	}
	fmt.Fprintln(f, word)
	os.Exit(1)
}

func TestAwaitDevice(t *testing.T) {
	events, err := listenUevents()
	if err != nil {
		t.Skipf("no device events here: %v", err)
	}
	defer unix.Close(events)
	if err := awaitDevice(events, "/dev/null", time.Now()); err != nil {
		t.Error(err)
	}
	if err := awaitDevice(events, "/dev/no-such-device", time.Now().Add(20*time.Millisecond)); err == nil {
		t.Error("a device that is not there was found")
	}
}
