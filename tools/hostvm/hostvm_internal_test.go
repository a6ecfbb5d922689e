package hostvm

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cavaliergopher/cpio"
	"golang.org/x/sys/unix"
)

func TestVirtFlag(t *testing.T) {
	for name, c := range map[string]struct{ cpuinfo, want string }{
		"intel":          {"processor\t: 0\nflags\t\t: fpu vme vmx ssse3\nvmx flags\t: vnmi\n", "vmx"},
		"amd":            {"processor\t: 0\nflags\t\t: fpu svm sse4a\n", "svm"},
		"neither":        {"processor\t: 0\nflags\t\t: fpu vme hypervisor\n", ""},
		"part of a word": {"flags\t\t: fpu vmx_like nosvm\n", ""},
		"only vmx flags": {"vmx flags\t: vmx\nflags\t\t: fpu\n", ""},
		"empty":          {"", ""},
	} {
		if got := virtFlag(c.cpuinfo); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

func TestProbeKVMSaysWhatIsWrong(t *testing.T) {
	if err := probeKVM(filepath.Join(t.TempDir(), "kvm")); err == nil || !strings.Contains(err.Error(), "is missing") {
		t.Errorf("missing device: %v", err)
	}
	if err := probeKVM("/dev/null"); err == nil || !strings.Contains(err.Error(), "is not KVM") {
		t.Errorf("another device: %v", err)
	}
}

func TestParsePID(t *testing.T) {
	for in, ok := range map[string]bool{
		"12 345\n": true, "12 345": true,
		"": false, "12": false, "12 345 6": false, "x 345": false, "12 x": false, "1 345": false, "0 1": false, "-5 1": false,
	} {
		p, err := parsePID(in)
		if (err == nil) != ok || ok && p != (process{pid: 12, start: 345}) {
			t.Errorf("%q: %+v, %v", in, p, err)
		}
	}
}

func FuzzParsePID(f *testing.F) {
	f.Add("12 345\n")
	f.Add("-1 18446744073709551616")
	f.Fuzz(func(t *testing.T, in string) {
		if p, err := parsePID(in); err == nil && p.pid <= 1 {
			t.Fatalf("%q became process %d, which must not be signalled", in, p.pid)
		}
	})
}

func TestStartTimeSkipsTheName(t *testing.T) {
	rest := " S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4242 20"
	for _, name := range []string{"qemu", "a b", "x) S 1 2", ""} {
		if got, err := startTime("77 (" + name + ")" + rest); err != nil || got != 4242 {
			t.Errorf("%q: %d, %v", name, got, err)
		}
	}
	for _, bad := range []string{"", "77 (x)", "77 (x) S 1", "77 x S"} {
		if _, err := startTime(bad); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

func TestWrapperWritesWhoItBecomes(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "pid")
	cmd, err := startWrapped(file, filepath.Join(dir, "log"), "/bin/sleep", []string{"600"})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	var p process
	for ok := false; !ok; time.Sleep(time.Millisecond) {
		if p, ok, err = readPID(file); err != nil {
			t.Fatal(err)
		}
	}
	if p.pid != cmd.Process.Pid || !p.alive() {
		t.Fatalf("file says %+v, process is %d", p, cmd.Process.Pid)
	}
	// The same number with another start time is another process, and must be left alone.
	other := process{pid: p.pid, start: p.start + 1}
	if err := other.stop(t.Context()); err != nil || other.alive() || !p.alive() {
		t.Fatalf("stopping a namesake: %v; ours alive: %v", err, p.alive())
	}
	if err := p.stop(t.Context()); err != nil || p.alive() {
		t.Fatalf("stop: %v", err)
	}
	<-ended
	if err := p.stop(t.Context()); err != nil {
		t.Fatalf("stopping again: %v", err)
	}
}

// A lock somebody holds around the launcher was held on by QEMU, and nobody could start anything until it was down.
func TestStartedProcessInheritsNothing(t *testing.T) {
	dir := t.TempDir()
	f, err := os.Create(filepath.Join(dir, "held"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := unix.FcntlInt(f.Fd(), unix.F_SETFD, 0); err != nil {
		t.Fatal(err)
	}
	cmd, err := startWrapped(filepath.Join(dir, "pid"), filepath.Join(dir, "log"), "/bin/ls", []string{"-l", "/proc/self/fd"})
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	out, err := os.ReadFile(filepath.Join(dir, "log"))
	if err != nil || strings.Contains(string(out), "/held") || !strings.Contains(string(out), "/log") {
		t.Fatalf("%v\n%s", err, out)
	}
}

func TestLockWaitsAndGivesUp(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	held, err := lock(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Millisecond)
	defer cancel()
	if _, err := lock(ctx, path); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("second lock: %v", err)
	}
	held.Close()
	again, err := lock(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	again.Close()
}

func TestConsoleTellsHowFarItCame(t *testing.T) {
	const boot = "SeaBIOS\r\nc\x1b[?7ltorpor-hostvm: first process at 2.82 s\r\n"
	for in, want := range map[string]bootStage{
		"":          {},
		"SeaBIOS\n": {},
		boot:        {firstProcess: "2.82"},
		boot + "torpor-hostvm: ready at 4.1 s\r\n":                             {firstProcess: "2.82", ready: true},
		boot + "torpor-hostvm: FATAL: no disk with serial number \"data\"\r\n": {firstProcess: "2.82", fatal: `no disk with serial number "data"`},
		"torpor-hostvm: alive at 5 s\n":                                        {},
	} {
		if got := parseConsole([]byte(in)); got != want {
			t.Errorf("%q: %+v, want %+v", in, got, want)
		}
	}
	path := filepath.Join(t.TempDir(), "console.log")
	if got := lastWords(path); got != "nothing on its console" {
		t.Errorf("no console: %s", got)
	}
	if err := os.WriteFile(path, []byte("Kernel panic\ntorpor-hostvm: alive at 5 s\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := lastWords(path); got != `its console ends with "Kernel panic"` {
		t.Errorf("got %s", got)
	}
}

func TestQEMUVersion(t *testing.T) {
	for in, want := range map[string]int{
		"QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)\nCopyright": 10,
		"QEMU emulator version 7.2.22":                                   7,
		"QEMU emulator version x.y":                                      0,
		"":                                                               0,
	} {
		if got, err := qemuVersion(in); got != want || (err == nil) != (want != 0) {
			t.Errorf("%q: %d, %v", in, got, err)
		}
	}
}

func TestMachineReachesNothingButForwards(t *testing.T) {
	args := strings.Join(machine{
		name: "t", console: "/a,b/console.log", dataDisk: "/d", forwards: []Forward{{Host: 4000, Guest: 3000}},
	}.arguments(), " ")
	for _, want := range []string{
		"restrict=on", "hostfwd=tcp:127.0.0.1:4000-10.0.2.15:3000", "path=/a,,b/console.log", "-monitor none", "-nodefaults",
	} {
		if !strings.Contains(args, want) {
			t.Errorf("no %s in %s", want, args)
		}
	}
	if strings.Contains(args, "images") {
		t.Errorf("an image disk without an image set: %s", args)
	}
}

func TestQEMUKeepsToOneAllowedProcessor(t *testing.T) {
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"up", "test", "a", "b", "c"} {
		program, args, err := machine{name: name}.pinned("/bin/qemu")
		if err != nil || program != "taskset" || args[0] != "-c" || args[2] != "/bin/qemu" {
			t.Fatalf("%s: %s %q, %v", name, program, args, err)
		}
		if cpu, err := strconv.Atoi(args[1]); err != nil || !allowed.IsSet(cpu) {
			t.Errorf("%s: processor %s is not one of ours (%v)", name, args[1], err)
		}
	}
}

func TestInstanceNames(t *testing.T) {
	for name, ok := range map[string]bool{
		"up": true, "test-2": true, "": false, "-x": false, "../x": false, "a/b": false, "A": false, strings.Repeat("a", 33): false,
	} {
		if _, err := Open(t.TempDir(), name); (err == nil) != ok {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestDownInstanceSaysSo(t *testing.T) {
	i, err := Open(t.TempDir(), "gone")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := i.Exec(t.Context(), "true", nil, io.Discard, io.Discard); !errors.Is(err, ErrDown) {
		t.Errorf("exec: %v", err)
	}
	if _, err := i.Address(3000); !errors.Is(err, ErrDown) {
		t.Errorf("address: %v", err)
	}
	if st, err := i.Status(t.Context()); err != nil || st.State != "down" {
		t.Errorf("status: %+v, %v", st, err)
	}
	if err := i.Down(t.Context(), false); err != nil {
		t.Errorf("down: %v", err)
	}
}

func TestBadStartsAreRefusedInASentence(t *testing.T) {
	i, err := Open(t.TempDir(), "t")
	if err != nil {
		t.Fatal(err)
	}
	for want, c := range map[string]Config{
		"directory of binaries": {},
		"512 is the least":      {Bin: "x", MemoryMiB: 5},
		"processors":            {Bin: "x", CPUs: 99},
		"pair of ports":         {Bin: "x", Forwards: []Forward{{Guest: 70000}}},
	} {
		if err := i.Up(t.Context(), c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q, got %v", want, err)
		}
	}
	port, err := pickPort(0)
	if err != nil || port == 0 {
		t.Fatalf("free port: %d, %v", port, err)
	}
	if err := needFree(t.TempDir(), 1<<60); err == nil || !strings.Contains(err.Error(), "TORPOR_CACHE") {
		t.Errorf("disk full: %v", err)
	}
}

func TestInitrdHoldsWhatTheMachineNeeds(t *testing.T) {
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Skip("needs busybox (tools/setup/deps.sh)")
	}
	bin := t.TempDir()
	for _, n := range []string{initBinary, "envd", "mod.ko"} {
		if err := os.WriteFile(filepath.Join(bin, n), []byte(n), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	out := filepath.Join(bin, "initrd")
	err = writeInitrd(t.Context(), out, initrdSpec{
		modules: []string{filepath.Join(bin, "mod.ko")}, busybox: busybox, bin: bin, binaries: []string{"envd"},
		settings: guestSettings{Hostname: "h", Token: "secret"},
	})
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(out)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	got := map[string]string{}
	for r := cpio.NewReader(f); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		got[h.Name] = h.Linkname + string(b)
	}
	for name, want := range map[string]string{
		"init": initBinary, "bin/sh": "busybox", "usr/lib/torpor/bin/envd": "envd", "lib/modules/mod.ko": "mod.ko",
		"etc/hostvm/modules": "/lib/modules/mod.ko\n",
	} {
		if got[name] != want {
			t.Errorf("%s: %q, want %q", name, got[name], want)
		}
	}
	if st, err := os.Stat(out); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("it holds the token and is %v, %v", st.Mode(), err)
	}
	err = writeInitrd(t.Context(), out, initrdSpec{busybox: busybox, bin: bin, binaries: []string{"missing"}})
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing binary: %v", err)
	}
}
