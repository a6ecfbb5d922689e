package vmproc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"

	"torpor/api/apierr"
	"torpor/api/fdpass"
	"torpor/api/vmmpb"
)

// The test binary, called torpor-vmm, is a VMM without a machine.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == binaryName {
		os.Exit(standIn(os.Args))
	}
	os.Exit(m.Run())
}

type standInVMM struct {
	vmmpb.VMMService
	files *fdpass.Inbox
	quit  func()
}

// Boot answers as an error what is in the files, in their order, with an exclamation mark if a file can be written to.
func (v *standInVMM) Boot(_ context.Context, r *vmmpb.BootRequest) (*vmmpb.BootResponse, error) {
	var said []string
	names := []string{r.Kernel, r.Initrd}
	for _, d := range r.Machine.Disks {
		names = append(append(names, d.Base, d.Top), d.Layers...)
	}
	for _, n := range r.Machine.Nets {
		names = append(names, n.Tap)
	}
	for _, name := range append(names, r.Machine.Console.Log) {
		f, err := v.files.Claim(name)
		if err != nil {
			return nil, apierr.ToStatus(err)
		}
		text, _ := io.ReadAll(f)
		if _, err := f.Write(nil); err == nil {
			if flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0); err == nil && flags&unix.O_ACCMODE == unix.O_RDWR {
				text = append(text, '!')
			}
		}
		said = append(said, string(text))
		f.Close()
	}
	return nil, apierr.ToStatus(apierr.New(apierr.Busy, "%s", strings.Join(said, " ")))
}

func (v *standInVMM) Restore(_ context.Context, r *vmmpb.RestoreRequest) (*vmmpb.RestoreResponse, error) {
	f, err := v.files.Claim(r.State)
	if err != nil {
		return nil, apierr.ToStatus(err)
	}
	f.Close() // the others are left
	return &vmmpb.RestoreResponse{}, nil
}

func (v *standInVMM) Status(context.Context, *vmmpb.StatusRequest) (*vmmpb.StatusResponse, error) {
	return &vmmpb.StatusResponse{State: "idle"}, nil
}

func (v *standInVMM) Save(_ context.Context, r *vmmpb.SaveRequest) (*vmmpb.SaveResponse, error) {
	if r.Kind == vmmpb.SaveKind_SAVE_KIND_UNSPECIFIED {
		return nil, apierr.ToStatus(apierr.New(apierr.DiskFull, "no room"))
	}
	for _, name := range []string{r.State, r.Memory} {
		f, err := v.files.Claim(name)
		if err != nil {
			return nil, apierr.ToStatus(err)
		}
		fmt.Fprint(f, "saved")
		f.Close()
	}
	return &vmmpb.SaveResponse{}, nil
}

func (v *standInVMM) Checkpoint(_ context.Context, r *vmmpb.CheckpointRequest) (*vmmpb.CheckpointResponse, error) {
	if r.Kind == vmmpb.SaveKind_SAVE_KIND_UNSPECIFIED {
		return nil, apierr.ToStatus(apierr.New(apierr.DiskFull, "no room"))
	}
	for _, name := range append([]string{r.State, r.Memory}, r.Tops...) {
		f, err := v.files.Claim(name)
		if err != nil {
			return nil, apierr.ToStatus(err)
		}
		fmt.Fprint(f, "saved")
		f.Close()
	}
	return &vmmpb.CheckpointResponse{}, nil
}

func (v *standInVMM) Quit(context.Context, *vmmpb.QuitRequest) (*vmmpb.QuitResponse, error) {
	time.AfterFunc(10*time.Millisecond, v.quit)
	return &vmmpb.QuitResponse{}, nil
}

// isChild is set for the child of a stand-in that has one.
const isChild = "STAND_IN_CHILD"

// standIn behaves as the name of its directory says.
func standIn(args []string) int {
	name := filepath.Base(args[2])
	if name == "idie" {
		return 3
	}
	if name == "ihang" {
		time.Sleep(time.Hour)
	}
	if os.Getenv(isChild) != "" {
		_, _ = io.Copy(io.Discard, os.Stdin)
		return 0
	}
	l, err := net.FileListener(os.NewFile(3, "control"))
	if err != nil {
		return 1
	}
	if name == "iview" {
		child := exec.Command(os.Args[0], os.Args[1:]...)
		child.Env = append(os.Environ(), isChild+"=1")                       // what we inherited it inherits too: nothing else tells it from us
		if _, err := child.StdinPipe(); err != nil || child.Start() != nil { // it ends with us
			return 1
		}
	}
	files, err := net.FileListener(os.NewFile(4, "files"))
	if err != nil {
		return 1
	}
	server, err := ttrpc.NewServer()
	if err != nil {
		return 1
	}
	quit := func() { os.Exit(0) }
	if name == "istubborn" {
		quit = func() {}
	}
	vmmpb.RegisterVMMService(server, &standInVMM{files: fdpass.NewInbox(files.(*net.UnixListener)), quit: quit})
	if server.Serve(context.Background(), l) != nil {
		return 1
	}
	return 0
}

func supervisor(t *testing.T) *Supervisor {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	binary := filepath.Join(dir, binaryName)
	if err := os.Symlink(self, binary); err != nil {
		t.Fatal(err)
	}
	return &Supervisor{Binary: binary, RunDir: runDir(t), KVM: os.DevNull}
}

// runDir is short, as the path of a socket must be.
func runDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "vm") //nolint:usetesting // that one has the test's name in its own
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func bounded(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func start(t *testing.T, s *Supervisor, name string) *Process {
	t.Helper()
	p, err := s.Start(bounded(t), name, filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.End(context.Background(), p.Identity()); err != nil {
			t.Error(err)
		}
	})
	return p
}

func TestStartAnswersAndStopEnds(t *testing.T) {
	s := supervisor(t)
	p := start(t, s, "i1")
	if st, err := p.Status(bounded(t), &vmmpb.StatusRequest{}); err != nil || st.State != "idle" {
		t.Fatalf("status %v, %v", st, err)
	}
	_, err := p.Save(bounded(t), &vmmpb.SaveRequest{})
	if !errors.Is(err, &apierr.Error{Code: apierr.DiskFull}) {
		t.Errorf("the typed error is lost: %v", err)
	}
	if err := p.Stop(bounded(t), 10*time.Second); err != nil {
		t.Fatal(err)
	}
	if p.Ended() != "exit status 0" {
		t.Errorf("ended with %q", p.Ended())
	}
	if err := p.Kill(bounded(t)); err != nil {
		t.Errorf("kill of one that ended: %v", err)
	}
}

func TestStopKillsWhoDoesNotQuit(t *testing.T) {
	p := start(t, supervisor(t), "istubborn")
	if err := p.Stop(bounded(t), 50*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	if p.Ended() != "signal: killed" {
		t.Errorf("ended with %q", p.Ended())
	}
}

func TestStartOfAVMMThatDiesSaysSoAtOnce(t *testing.T) {
	_, err := supervisor(t).Start(bounded(t), "idie", filepath.Join(t.TempDir(), "log"))
	if err == nil || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("got %v", err)
	}
}

func TestStartOfAVMMThatHangsEndsWithItsBudgetAndLeavesNoProcess(t *testing.T) {
	s := supervisor(t)
	ctx, cancel := context.WithTimeout(bounded(t), 200*time.Millisecond)
	defer cancel()
	if _, err := s.Start(ctx, "ihang", filepath.Join(t.TempDir(), "log")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	if found, err := s.Scan(); err != nil || len(found) > 0 {
		t.Errorf("left: %v, %v", found, err)
	}
}

// children is how many a process has.
func children(t *testing.T, pid int) (n int) {
	t.Helper()
	lists, err := filepath.Glob("/proc/" + itoa(pid) + "/task/*/children")
	if err != nil || len(lists) == 0 {
		t.Fatalf("who the children of %d are is unknown: %v", pid, err)
	}
	for _, path := range lists {
		if list, err := os.ReadFile(path); err == nil { // else the thread has ended, and its children are another's
			n += len(strings.Fields(string(list)))
		}
	}
	return n
}

// What a VMM takes as a view of its memory is a process with its command line, and no VMM.
func TestScanKnowsAViewFromAVMM(t *testing.T) {
	s := supervisor(t)
	p := start(t, s, "iview")
	if n := children(t, p.Identity().PID); n != 1 {
		t.Fatalf("it has %d children", n)
	}
	found, err := s.Scan()
	if err != nil || len(found) != 1 || found[0].Identity != p.Identity() {
		t.Errorf("found %v, %v", found, err)
	}
}

func TestAnotherAgentTakesAProcessOver(t *testing.T) {
	s := supervisor(t)
	first := start(t, s, "i1")
	id := first.Identity()
	first.Detach()
	<-first.Done()
	if err := first.Kill(bounded(t)); !errors.Is(err, errDetached) {
		t.Errorf("one that was let go of was killed: %v", err)
	}
	found, err := s.Scan()
	if err != nil || len(found) != 1 || found[0].Name != "i1" || found[0].Identity != id {
		t.Fatalf("found %v, %v", found, err)
	}
	second, err := s.Adopt(bounded(t), "i1", id)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := second.Status(bounded(t), &vmmpb.StatusRequest{}); err != nil {
		t.Error(err)
	}
	in := dirOf(t)
	if _, err := second.Save(bounded(t), &vmmpb.SaveRequest{Kind: vmmpb.SaveKind_SAVE_KIND_FULL, State: in("state"), Memory: in("memory")}); err != nil {
		t.Errorf("files do not reach one that was taken over: %v", err)
	}
	if err := second.Kill(bounded(t)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Adopt(bounded(t), "i1", id); !errors.Is(err, ErrGone) {
		t.Errorf("a dead one was adopted: %v", err)
	}
}

func TestDeathIsAnEvent(t *testing.T) {
	s := supervisor(t)
	p := start(t, s, "i1")
	if err := s.End(bounded(t), p.Identity()); err != nil {
		t.Fatal(err)
	}
	select {
	case <-p.Done():
	case <-bounded(t).Done():
		t.Fatal("nobody noticed")
	}
	if p.Ended() != "signal: killed" {
		t.Errorf("ended with %q", p.Ended())
	}
}

func TestAReusedPIDIsNeverTakenForTheVMM(t *testing.T) {
	s := supervisor(t)
	p := start(t, s, "i1")
	for name, id := range map[string]Identity{
		"start time": {PID: p.Identity().PID, Start: p.Identity().Start + 1, Boot: p.Identity().Boot},
		"boot":       {PID: p.Identity().PID, Start: p.Identity().Start, Boot: "another"},
	} {
		if _, err := s.Adopt(bounded(t), "i1", id); !errors.Is(err, ErrGone) {
			t.Errorf("%s: got %v", name, err)
		}
		if err := s.End(bounded(t), id); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := p.Status(bounded(t), &vmmpb.StatusRequest{}); err != nil {
		t.Errorf("it was hit: %v", err)
	}
}

func TestTheVMMIsInItsOwnSessionWithoutOurEnvironment(t *testing.T) {
	p := start(t, supervisor(t), "i1")
	out, err := exec.Command("ps", "-o", "sid=", "-p", itoa(p.Identity().PID)).Output()
	if err == nil && strings.TrimSpace(string(out)) != itoa(p.Identity().PID) {
		t.Errorf("session %s", out)
	}
	env, err := os.ReadFile("/proc/" + itoa(p.Identity().PID) + "/environ")
	if err != nil || len(env) > 0 {
		t.Errorf("environment %q, %v", env, err)
	}
}

func itoa(n int) string { return strconv.Itoa(n) }

func TestMachineOf(t *testing.T) {
	for cmdline, want := range map[string]string{
		"/usr/bin/torpor-vmm\x00--machine\x00/run/t/vm/i1\x00--log\x00x\x00": "i1",
		"torpor-vmm\x00--machine\x00/run/other/vm/i1\x00":                    "",
		"torpor-vmm\x00--machine\x00/run/t/vm/i1/deep\x00":                   "",
		"vim\x00--machine\x00/run/t/vm/i1\x00":                               "",
		"torpor-vmm\x00--machine\x00":                                        "",
		"torpor-vmm\x00":                                                     "",
		"":                                                                   "",
	} {
		name, ok := machineOf([]byte(cmdline), "/run/t/vm")
		if ok != (want != "") || (ok && name != want) {
			t.Errorf("%q: got %q, %v", cmdline, name, ok)
		}
	}
}

func FuzzParseStat(f *testing.F) {
	f.Add([]byte("42 (a) b) c) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 777 20"))
	f.Add([]byte("1 (x"))
	f.Add([]byte(") 1 2"))
	self, err := os.Open("/proc/self/stat")
	if err == nil {
		raw, _ := io.ReadAll(self)
		self.Close()
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		if s, err := parseStat(raw); err == nil && s.start == 0 && !bytes.Contains(raw, []byte("0")) {
			t.Errorf("%q has start time 0", raw)
		}
	})
}

func TestParseStatCountsFromTheLastParenthesis(t *testing.T) {
	s, err := parseStat([]byte("42 (a) b) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 777 20"))
	if err != nil || s != (stat{state: 'S', parent: 1, start: 777}) {
		t.Errorf("got %+v, %v", s, err)
	}
}
