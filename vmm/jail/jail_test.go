package jail

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// The test binary is also the program that is jailed: "probe MODE NAME [ARG]" tries one thing and says how it went.
func TestMain(m *testing.M) {
	if spec, asked, err := Asked(os.Args[1:]); asked {
		if err == nil {
			err = Enter(spec)
		}
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if len(os.Args) > 3 && os.Args[1] == "probe" {
		os.Exit(probe(os.Args[2], os.Args[3], strings.Join(os.Args[4:], " ")))
	}
	code := m.Run()
	_ = os.RemoveAll(built)
	os.Exit(code)
}

// probe does what one of the maps of attempts_test.go has under name. Mode "lock" puts the filter on first.
func probe(mode, name, arg string) int {
	if mode == "lock" {
		if err := Lock(testIOCTLs); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	if name == "wait" || name == "serve" {
		if name == "serve" {
			if _, err := net.Listen("unix", arg); err != nil {
				fmt.Fprintln(os.Stderr, err)
				return 1
			}
		}
		fmt.Println("ready")
		_, _ = io.Copy(io.Discard, os.Stdin)
		return 0
	}
	var err error
	for _, m := range []map[string]func() error{forbidden, refused, permitted} {
		if f := m[name]; f != nil {
			err = f()
		}
	}
	if f := beyond[name]; f != nil {
		err = f(arg)
	}
	if name == "signal as the same user" {
		if err = raw(unix.SYS_SETRESUID, testUID, testUID, testUID); err == nil {
			err = unix.Kill(atoi(arg), 0)
		}
	}
	if name == "list the root" {
		entries, rerr := os.ReadDir("/")
		err = fmt.Errorf("%v %w", entries, rerr)
	}
	fmt.Println(outcome(err))
	return 0
}

// outcome is what a probe prints: "ok" or the error's name.
func outcome(err error) string {
	if errno, ok := errors.AsType[unix.Errno](err); ok {
		return unix.ErrnoName(errno)
	}
	if err != nil {
		return err.Error()
	}
	return "ok"
}

func atoi(s string) int { n, _ := strconv.Atoi(s); return n }

func dial(network, address string) error {
	c, err := net.Dial(network, address)
	if err == nil {
		c.Close()
	}
	return err
}

// built is the directory of what program built; TestMain removes it.
var built string

// program is the probe: static, because in a jail there is no library to load.
var program = sync.OnceValues(func() (_ string, err error) {
	if !builtWithCgo {
		return os.Executable()
	}
	if built, err = os.MkdirTemp("", "jail-probe-"); err != nil {
		return "", err
	}
	file := filepath.Join(built, "probe")
	cmd := exec.Command("go", "test", "-c", "-o", file, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the probe: %w: %s", err, out)
	}
	return file, nil
})

func needProgram(t *testing.T) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: namespaces and users are made")
	}
	p, err := program()
	if errors.Is(err, exec.ErrNotFound) {
		t.Skipf("needs the go command, or a test binary built with CGO_ENABLED=0: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return p
}

const testUID = 1_950_000_001

// jailed is the probe in a jail, outside it as anything else.
func jailed(t *testing.T, uid int, args ...string) *exec.Cmd {
	t.Helper()
	spec := Spec{UID: uid, Files: 3, Limits: DefaultLimits, Args: append([]string{"probe"}, args...)}
	cmd := exec.Command(needProgram(t), spec.Argv()...)
	cmd.SysProcAttr = &unix.SysProcAttr{
		Cloneflags: unix.CLONE_NEWPID, Setsid: true,
		Credential: &syscall.Credential{Groups: []uint32{1, 2}}, // as an agent might have
	}
	return cmd
}

func free(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(needProgram(t), append([]string{"probe"}, args...)...)
	cmd.Dir = t.TempDir()
	return cmd
}

// result runs a probe to its end: what it printed, or the signal that killed it.
func result(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	var out, complaint bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaint
	err := cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		if status := exit.Sys().(syscall.WaitStatus); status.Signaled() {
			return unix.SignalName(status.Signal())
		}
	}
	if err != nil {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, &complaint)
	}
	return strings.TrimSpace(out.String())
}

func TestFilterEndsTheProcess(t *testing.T) {
	for name := range forbidden {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := result(t, free(t, "open", name)); got == "SIGSYS" {
				t.Errorf("outside: %s: the test proves nothing", got)
			}
			if got := result(t, jailed(t, testUID, "lock", name)); got != "SIGSYS" {
				t.Errorf("in the jail: %s, want to be killed", got)
			}
		})
	}
}

func TestFilterRefuses(t *testing.T) {
	for name := range refused {
		if got := result(t, jailed(t, testUID, "open", name)); got != "ok" {
			t.Errorf("%s without the filter: %s", name, got)
		}
		if got := result(t, jailed(t, testUID, "lock", name)); got != "EPERM" {
			t.Errorf("%s: %s, want EPERM", name, got)
		}
	}
}

func TestFilterLetsLive(t *testing.T) {
	for name := range permitted {
		if got := result(t, jailed(t, testUID, "lock", name)); got != "ok" {
			t.Errorf("%s: %s", name, got)
		}
	}
}

// leakedFile is a descriptor that the tests leave open to every child, as a careless agent might.
const leakedFile = 77

func TestJailAloneHolds(t *testing.T) {
	needProgram(t)
	if err := unix.Dup2(0, leakedFile); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(leakedFile)
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	abstract := fmt.Sprintf("@torpor-jail-test-%d", os.Getpid())
	unixListener, err := net.Listen("unix", abstract)
	if err != nil {
		t.Fatal(err)
	}
	defer unixListener.Close()
	key := os.Getpid()
	shm, err := unix.SysvShmGet(key, 4096, unix.IPC_CREAT|unix.IPC_EXCL|0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.SysvShmCtl(shm, unix.IPC_RMID, nil)
	args := map[string]string{
		"see a host process":        strconv.Itoa(os.Getpid()),
		"signal a host process":     strconv.Itoa(os.Getpid()),
		"reach a loopback listener": tcp.Addr().String(),
		"reach an abstract socket":  abstract,
		"find shared memory":        strconv.Itoa(key),
	}
	for name := range beyond {
		t.Run(name, func(t *testing.T) {
			if name == "open the KVM device" && open("/dev/kvm", unix.O_RDWR) != nil {
				t.Skip("needs /dev/kvm, to be kept from it")
			}
			switch got := result(t, free(t, "open", name, args[name])); got {
			case "ok":
			case "ENOSYS":
				t.Skip("this kernel cannot do it")
			default:
				t.Errorf("outside: %s: the test proves nothing", got)
			}
			if got := result(t, jailed(t, testUID, "open", name, args[name])); got == "ok" {
				t.Error("it succeeded in the jail")
			}
		})
	}
}

func TestRootHasTheProgramAndNothingElse(t *testing.T) {
	got := result(t, jailed(t, testUID, "open", "list the root"))
	if want := "[d proc/ - torpor-vmm]"; !strings.HasPrefix(got, want) {
		t.Errorf("got %s, want %s", got, want)
	}
}

// resident is a jailed process that waits to be told to end.
type resident struct {
	*exec.Cmd
	stdin io.Closer
}

func reside(t *testing.T, cmd *exec.Cmd) resident {
	t.Helper()
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var complaint bytes.Buffer
	cmd.Stderr = &complaint
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r := resident{cmd, stdin}
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "ready\n" {
		r.end()
		t.Fatalf("got %q, %v: %s", line, err, &complaint)
	}
	return r
}

func (r resident) end() {
	r.stdin.Close()
	_ = r.Process.Kill()
	_ = r.Wait()
}

func (r resident) proc(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", r.Process.Pid, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestStatusOfAJailedProcess(t *testing.T) {
	r := reside(t, jailed(t, testUID, "lock", "wait"))
	defer r.end()
	fields := map[string]string{}
	for line := range strings.Lines(r.proc(t, "status")) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		fields[name] = strings.Join(strings.Fields(value), " ")
	}
	id := strconv.Itoa(testUID)
	none := strings.Repeat("0", 16)
	for name, want := range map[string]string{
		"Uid": strings.Join([]string{id, id, id, id}, " "), "Gid": strings.Join([]string{id, id, id, id}, " "), "Groups": "",
		"CapInh": none, "CapPrm": none, "CapEff": none, "CapBnd": none, "CapAmb": none, "NoNewPrivs": "1", "Seccomp": "2",
		"NSpid": strconv.Itoa(r.Process.Pid) + " 1",
	} {
		if fields[name] != want {
			t.Errorf("%s is %q, want %q", name, fields[name], want)
		}
	}
	// What belongs to root there is closed to a process of the same user.
	var st unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/%d/mem", r.Process.Pid), &st); err != nil || st.Uid != 0 {
		t.Errorf("its memory belongs to user %d, %v", st.Uid, err)
	}
	if fields["Threads"] == "1" {
		t.Error("a Go process with one thread cannot show that the filter is on all of them")
	}
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", r.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		if b, err := os.ReadFile(task); err == nil && !strings.Contains(string(b), "Seccomp:\t2\n") {
			t.Errorf("%s has no filter", task)
		}
	}
	limits := r.proc(t, "limits")
	for _, want := range []string{"Max core file size 0 0", "Max processes 512 512", "Max locked memory 0 0"} {
		if !strings.Contains(strings.Join(strings.Fields(limits), " "), want) {
			t.Errorf("limits lack %q:\n%s", want, limits)
		}
	}
	if env := r.proc(t, "environ"); env != environment[0]+"\x00" {
		t.Errorf("it has the environment %q", env)
	}
	if mounts := r.proc(t, "mountinfo"); strings.Count(mounts, "\n") != 3 || strings.Count(mounts, " ro,nosuid,nodev") != 3 {
		t.Errorf("want three read-only mounts, got\n%s", mounts)
	}
}

func TestTwoJailsShareNothing(t *testing.T) {
	const name = "@the-same-name-in-both"
	a := reside(t, jailed(t, testUID, "open", "serve", name))
	defer a.end()
	b := reside(t, jailed(t, testUID+1, "open", "serve", name)) // would fail if the name were taken
	defer b.end()
	if !strings.Contains(a.proc(t, "status"), "NoNewPrivs:\t1\n") {
		t.Error("without the filter, a program could give it privileges")
	}
	for _, ns := range []string{"mnt", "pid", "net", "ipc", "uts", "cgroup"} {
		inodes := map[string]bool{}
		for _, pid := range []string{"self", strconv.Itoa(a.Process.Pid), strconv.Itoa(b.Process.Pid)} {
			inode, err := os.Readlink("/proc/" + pid + "/ns/" + ns)
			if err != nil {
				t.Fatal(err)
			}
			inodes[inode] = true
		}
		if len(inodes) != 3 {
			t.Errorf("namespace %s is shared: %v", ns, inodes)
		}
	}
	// Each is process 1 of its own and sees nobody else; what belongs to the other's user it could not touch anyway.
	for what, cmd := range map[string]*exec.Cmd{
		"see":    jailed(t, testUID, "open", "see a host process", strconv.Itoa(a.Process.Pid)),
		"signal": jailed(t, testUID, "open", "signal a host process", strconv.Itoa(a.Process.Pid)),
		"reach":  jailed(t, testUID+2, "open", "reach an abstract socket", name),
	} {
		if got := result(t, cmd); got == "ok" {
			t.Errorf("a third one can %s the first", what)
		}
	}
	// Outside the jail, the very same user reaches the very same process: what keeps it away above is the jail.
	peer := free(t, "open", "signal as the same user", strconv.Itoa(a.Process.Pid))
	if got := result(t, peer); got != "ok" {
		t.Errorf("its own user outside the jail: %s: the test proves nothing", got)
	}
}
