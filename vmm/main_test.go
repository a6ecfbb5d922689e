package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/ttrpc"
	"github.com/rs/zerolog"
	"golang.org/x/sys/unix"

	"torpor/api/apierr"
	"torpor/api/fdpass"
	"torpor/api/vmmpb"
	"torpor/vmm/cow"
	"torpor/vmm/jail"
	"torpor/vmm/snapshot"
)

const patience = 60 * time.Second

// rootVariable makes the test binary a torpor-vmm that has nothing but an empty directory for a root once it serves.
const rootVariable = "TORPOR_TEST_ROOT"

func TestMain(m *testing.M) {
	if root := os.Getenv(rootVariable); root != "" {
		if err := serveWithin(root); err != nil {
			_, _ = os.Stderr.WriteString(err.Error() + "\n")
			os.Exit(1)
		}
		os.Exit(0)
	}
	code := m.Run()
	_ = os.RemoveAll(built)
	os.Exit(code)
}

func serveWithin(root string) error {
	in, err := inherit("")
	if err != nil {
		return err
	}
	if err := errors.Join(unix.Chroot(root), unix.Chdir("/")); err != nil {
		return err
	}
	log := zerolog.New(os.Stderr)
	return errors.Join(serve(context.Background(), in.control, newServer(in.host, fdpass.NewInbox(in.files), in.vsock, log)), in.host.Close())
}

// process is a torpor-vmm of the test's own.
type process struct {
	vmmpb.VMMService
	t     *testing.T
	files *fdpass.Sender
	vsock string
	pid   int
	ended chan error
}

// starts are the two ways a process is started: as the test binary, where the race detector watches it, and as the program
// itself, in its jail and behind its filter.
var starts = map[string]func(*testing.T) *exec.Cmd{"chroot": withoutPaths, "jail": jailed}

func withoutPaths(t *testing.T) *exec.Cmd {
	cmd := exec.Command(os.Args[0])
	cmd.Env = []string{rootVariable + "=" + t.TempDir()}
	return cmd
}

func jailed(t *testing.T) *exec.Cmd {
	program, err := vmm()
	if errors.Is(err, exec.ErrNotFound) {
		t.Skipf("needs the go command: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	spec := jail.Spec{UID: 1_950_200_000, Files: kvmFD + 1, Limits: jail.DefaultLimits, Args: []string{"--machine", "/run/x/started-ahead"}}
	cmd := exec.Command(program, spec.Argv()...)
	cmd.SysProcAttr = &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
	return cmd
}

// built is the directory of what vmm built; TestMain removes it.
var built string

// vmm builds the program under test, as the Makefile does.
var vmm = sync.OnceValues(func() (_ string, err error) {
	if built, err = os.MkdirTemp("", "vmm-test-"); err != nil {
		return "", err
	}
	program := filepath.Join(built, "torpor-vmm")
	cmd := exec.Command("go", "build", "-o", program, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build torpor-vmm: %w: %s", err, out)
	}
	return program, nil
})

func start(t *testing.T, command func(*testing.T) *exec.Cmd) *process {
	t.Helper()
	dev, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil || os.Geteuid() != 0 {
		t.Skipf("needs root and a KVM: %v", err)
	}
	defer dev.Close()
	dir := t.TempDir()
	cmd := command(t)
	cmd.Stderr = os.Stderr
	for _, s := range []struct{ name, network string }{{"control", "unix"}, {"files", "unixpacket"}, {"vsock", "unix"}} {
		l, err := net.ListenUnix(s.network, &net.UnixAddr{Name: filepath.Join(dir, s.name), Net: s.network})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		f, err := l.File()
		if err != nil {
			t.Fatal(err)
		}
		cmd.ExtraFiles = append(cmd.ExtraFiles, f)
		defer l.Close()
		defer f.Close()
	}
	cmd.ExtraFiles = append(cmd.ExtraFiles, dev)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &process{t: t, vsock: filepath.Join(dir, "vsock"), pid: cmd.Process.Pid, ended: make(chan error, 1)}
	t.Cleanup(func() { _ = cmd.Process.Kill(); <-p.ended })
	go func() { p.ended <- cmd.Wait(); close(p.ended) }()
	conn, err := net.Dial("unix", filepath.Join(dir, "control"))
	if err != nil {
		t.Fatal(err)
	}
	client := ttrpc.NewClient(conn)
	t.Cleanup(func() { client.Close() })
	p.VMMService = vmmpb.NewVMMClient(client)
	if p.files, err = fdpass.Dial(p.ctx(), filepath.Join(dir, "files")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.files.Close() })
	return p
}

func (p *process) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	p.t.Cleanup(cancel)
	return ctx
}

// send hands a file over under the name of the last element of its path, which it returns.
func (p *process) send(path string, flags int) string {
	p.t.Helper()
	f, err := os.OpenFile(path, flags, 0o600)
	if err != nil {
		p.t.Fatal(err)
	}
	defer f.Close()
	if err := p.files.Send(p.ctx(), filepath.Base(path), f); err != nil {
		p.t.Fatal(err)
	}
	return filepath.Base(path)
}

func (p *process) quit() {
	p.t.Helper()
	if _, err := p.Quit(p.ctx(), &vmmpb.QuitRequest{}); err != nil && !errors.Is(err, ttrpc.ErrClosed) { // it may go before it answers
		p.t.Fatal(err)
	}
	if err := <-p.ended; err != nil {
		p.t.Fatal(err)
	}
}

// loop is an ELF kernel that does nothing for ever.
func loop(t *testing.T) string {
	t.Helper()
	const entry = 0x1000000
	le := binary.LittleEndian
	b := make([]byte, 0x1000, 0x1002)
	copy(b, "\x7fELF\x02\x01\x01")
	le.PutUint16(b[16:], 2)  // executable
	le.PutUint16(b[18:], 62) // x86-64
	le.PutUint64(b[24:], entry)
	le.PutUint64(b[32:], 64) // program headers
	le.PutUint16(b[54:], 56)
	le.PutUint16(b[56:], 1)
	ph := b[64:]
	le.PutUint32(ph, 1) // PT_LOAD
	le.PutUint64(ph[8:], 0x1000)
	le.PutUint64(ph[24:], entry)
	le.PutUint64(ph[32:], 2)
	le.PutUint64(ph[40:], 2)
	path := filepath.Join(t.TempDir(), "kernel")
	if err := os.WriteFile(path, append(b, 0xeb, 0xfe), 0o600); err != nil { // jmp .
		t.Fatal(err)
	}
	return path
}

func (p *process) machine(dir string) *vmmpb.Machine {
	return &vmmpb.Machine{
		Vcpus: 1, MemoryBytes: 128 << 20,
		Disks: []*vmmpb.Disk{{
			Id: "root", Base: p.send(filepath.Join(dir, "base"), os.O_RDONLY), Layers: []string{p.send(filepath.Join(dir, "layer"), os.O_RDONLY)},
			Top: p.send(filepath.Join(dir, "top"), os.O_RDWR),
		}},
		Vsock:   &vmmpb.Vsock{Cid: 3},
		Console: &vmmpb.Console{Enabled: true, Log: p.send(filepath.Join(dir, "console"), os.O_CREATE|os.O_RDWR)},
	}
}

// A machine's whole life in a process that finds no file: what it needs it was given, or has opened before it served.
func TestWorksWithoutAnyPath(t *testing.T) {
	for name, command := range starts {
		t.Run(name, func(t *testing.T) { wholeLife(t, command) })
	}
}

func wholeLife(t *testing.T, command func(*testing.T) *exec.Cmd) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	if err := os.WriteFile(in("base"), make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, layer := range []string{"layer", "top"} {
		if err := cow.Create(in(layer), 1<<20); err != nil {
			t.Fatal(err)
		}
	}
	const create = os.O_CREATE | os.O_EXCL | os.O_RDWR

	p := start(t, command)
	if _, err := p.Boot(p.ctx(), &vmmpb.BootRequest{Machine: p.machine(dir), Kernel: p.send(loop(t), os.O_RDONLY)}); err != nil {
		t.Fatal(err)
	}
	parks(t, p.vsock)
	st, err := p.Status(p.ctx(), &vmmpb.StatusRequest{})
	if err != nil || st.State != "running" || st.ResidentBytes == 0 {
		t.Errorf("%v, %v", st, err)
	}
	if _, err := p.Pause(p.ctx(), &vmmpb.PauseRequest{}); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Save(p.ctx(), &vmmpb.SaveRequest{
		Kind: vmmpb.SaveKind_SAVE_KIND_FULL, State: p.send(in("state"), create), Memory: p.send(in("mem"), create),
	}); err != nil {
		t.Fatal(err)
	}
	p.quit()

	prefetches(t, command, dir)

	p = start(t, command)
	if _, err := p.Prepare(p.ctx(), &vmmpb.PrepareRequest{Vcpus: 1}); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Prepare(p.ctx(), &vmmpb.PrepareRequest{Vcpus: 1}); apierr.As(apierr.FromStatus(err)).Code != apierr.AlreadyRunning {
		t.Errorf("prepared twice: %v", err)
	}
	if _, err := p.Restore(p.ctx(), &vmmpb.RestoreRequest{
		Machine: p.machine(dir), State: p.send(in("state"), os.O_RDONLY), BaseMemory: p.send(in("mem"), os.O_RDONLY),
	}); err != nil {
		t.Fatal(err)
	}
	parks(t, p.vsock)
	if err := cow.Create(in("next"), 1<<20); err != nil {
		t.Fatal(err)
	}
	if r, err := p.Checkpoint(p.ctx(), &vmmpb.CheckpointRequest{
		Kind: vmmpb.SaveKind_SAVE_KIND_DIFF, State: p.send(in("state1"), create), Memory: p.send(in("diff1"), create),
		Tops: []string{p.send(in("next"), os.O_RDWR)},
	}); err != nil || r.StoppedUs == 0 {
		t.Fatalf("%v, %v", r, err)
	}
	if _, err := p.Pause(p.ctx(), &vmmpb.PauseRequest{}); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Save(p.ctx(), &vmmpb.SaveRequest{
		Kind: vmmpb.SaveKind_SAVE_KIND_CUMULATIVE, State: p.send(in("state2"), create), Memory: p.send(in("diff"), create),
	}); err != nil {
		t.Fatal(err)
	}
	p.quit()
	for name, diff := range map[string]string{"state1": "diff1", "state2": "diff"} {
		state, err := snapshot.ReadState(in(name))
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(snapshot.VerifyMemory(in("mem"), state), snapshot.VerifyLayers(state, in(diff))); err != nil {
			t.Error(err)
		}
	}
	verifies(t, command, dir)
}

// verifies restores with a layer that is mapped, and with the same one damaged: what was mapped is compared, in a thread of the
// lowest priority, before anything is saved.
func verifies(t *testing.T, command func(*testing.T) *exec.Cmd, dir string) {
	t.Helper()
	in := func(name string) string { return filepath.Join(dir, name) }
	const create = os.O_CREATE | os.O_TRUNC | os.O_RDWR
	state, err := snapshot.ReadState(in("state2"))
	if err != nil {
		t.Fatal(err)
	}
	layer, err := os.Create(in("layer256"))
	if err != nil {
		t.Fatal(err)
	}
	defer layer.Close()
	b := snapshot.NewLayerBuilder(snapshot.LayerInfo{ID: state.ID, MemoryBytes: state.Shape.MemoryBytes, Base: state.Base(), Parent: state.Base()})
	data := bytes.Repeat([]byte{1}, snapshot.ChunkBytes)
	if err := b.Add(snapshot.RunData, 0x4000, uint64(len(data)/snapshot.PageSize)); err != nil {
		t.Fatal(err)
	}
	b.Runs[0].Sum = snapshot.Checksum(data)
	_, err = layer.WriteAt(data, int64(b.Runs[0].Offset))
	info, finished := b.Finish(layer)
	if err := errors.Join(err, finished); err != nil {
		t.Fatal(err)
	}
	state.Memory.Top = info.Name()
	if err := os.WriteFile(in("state3"), state.Encode(), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, damaged := range []bool{false, true} {
		if damaged {
			if _, err := layer.WriteAt([]byte{2}, 100_000); err != nil {
				t.Fatal(err)
			}
		}
		p := start(t, command)
		_, err := p.Restore(p.ctx(), &vmmpb.RestoreRequest{
			Machine: p.machine(dir), State: p.send(in("state3"), os.O_RDONLY), BaseMemory: p.send(in("mem"), os.O_RDONLY),
			MemoryLayers: []string{p.send(in("layer256"), os.O_RDONLY)}, Stopped: true,
		})
		if err != nil {
			t.Fatal(err)
		}
		_, err = p.Save(p.ctx(), &vmmpb.SaveRequest{
			Kind: vmmpb.SaveKind_SAVE_KIND_DIFF, State: p.send(in("state4"), create), Memory: p.send(in("diff4"), create),
		})
		if damaged {
			if apierr.As(apierr.FromStatus(err)).Code != apierr.SandboxBroken || !strings.Contains(err.Error(), "memory layer 1, pages 16384-16639") {
				t.Errorf("saved what is damaged: %v", err)
			}
			if end, err := p.Wait(p.ctx(), &vmmpb.WaitRequest{}); err != nil || end.Reason != "memory" || !strings.Contains(end.Detail, "memory layer 1") {
				t.Errorf("ended by %v, %v", end, err)
			}
		} else if err != nil {
			t.Error(err)
		}
		p.quit()
	}
}

// prefetches records a working set and restores with it.
func prefetches(t *testing.T, command func(*testing.T) *exec.Cmd, dir string) {
	t.Helper()
	in := func(name string) string { return filepath.Join(dir, name) }
	const record = os.O_CREATE | os.O_TRUNC | os.O_RDWR
	for _, workingSet := range []string{"", in("ws")} {
		p := start(t, command)
		req := &vmmpb.RestoreRequest{
			Machine: p.machine(dir), State: p.send(in("state"), os.O_RDONLY), BaseMemory: p.send(in("mem"), os.O_RDONLY),
		}
		if workingSet != "" {
			req.WorkingSet = p.send(workingSet, os.O_RDONLY)
		}
		if _, err := p.Restore(p.ctx(), req); err != nil {
			t.Fatal(err)
		}
		parks(t, p.vsock)
		got, err := p.WorkingSet(p.ctx(), &vmmpb.WorkingSetRequest{File: p.send(in("ws2"), record)})
		if err != nil || got.Pages == 0 {
			t.Fatalf("%v, %v", got, err)
		}
		if err := os.Rename(in("ws2"), in("ws")); err != nil {
			t.Fatal(err)
		}
		p.quit()
	}
}

// A process that was started ahead shows the machine it became, and logs where that one's log is.
func TestClaimedProcessIsItsMachines(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	if err := os.WriteFile(in("base"), make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, layer := range []string{"layer", "top"} {
		if err := cow.Create(in(layer), 1<<20); err != nil {
			t.Fatal(err)
		}
	}
	for directory, code := range map[string]apierr.Code{"/run/x/one": "", "/run/x/longer-than-that-of-the-start": apierr.BadRequest} {
		p := start(t, jailed)
		m := p.machine(dir)
		m.Claim = &vmmpb.Claim{Directory: directory, Log: p.send(in("log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND)}
		_, err := p.Boot(p.ctx(), &vmmpb.BootRequest{Machine: m, Kernel: p.send(loop(t), os.O_RDONLY)})
		if code != "" {
			if apierr.As(apierr.FromStatus(err)).Code != code {
				t.Errorf("%s: %v", directory, err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p.pid))
		if want := "--machine\x00" + directory; err != nil || strings.TrimRight(string(args[strings.Index(string(args), "--machine"):]), "\x00") != want {
			t.Errorf("arguments %q, %v", args, err)
		}
		p.quit()
		if log, err := os.ReadFile(in("log")); err != nil || !strings.Contains(string(log), directory) {
			t.Errorf("log %q, %v", log, err)
		}
	}
}

// parks checks that the device serves the inherited socket.
func parks(t *testing.T, socket string) {
	t.Helper()
	c, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	answer := make([]byte, 3)
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte("LISTEN 7\n")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, answer); err != nil || string(answer) != "OK\n" {
		t.Fatalf("%q, %v", answer, err)
	}
}

func TestFilesThatWereNotHandedOver(t *testing.T) {
	p := start(t, withoutPaths)
	m := &vmmpb.Machine{Vcpus: 1, MemoryBytes: 128 << 20, Vsock: &vmmpb.Vsock{Cid: 3}}
	layerless := &vmmpb.Machine{Vcpus: 1, MemoryBytes: 128 << 20, Disks: []*vmmpb.Disk{{Layers: []string{""}}}}
	for _, c := range []struct {
		name string
		r    *vmmpb.BootRequest
	}{
		{"a path", &vmmpb.BootRequest{Machine: m, Kernel: "/etc/passwd"}},
		{"no name", &vmmpb.BootRequest{Machine: m}},
		{"one of two", &vmmpb.BootRequest{Machine: m, Kernel: p.send(loop(t), os.O_RDONLY), Initrd: "initrd"}},
		{"what an earlier call has taken", &vmmpb.BootRequest{Machine: m, Kernel: "kernel"}},
		{"a layer without a name", &vmmpb.BootRequest{Machine: layerless, Kernel: "kernel"}},
	} {
		if _, err := p.Boot(p.ctx(), c.r); !errors.Is(apierr.FromStatus(err), &apierr.Error{Code: apierr.BadRequest}) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	if _, err := p.Boot(p.ctx(), &vmmpb.BootRequest{Machine: m, Kernel: p.send(loop(t), os.O_RDONLY)}); err != nil {
		t.Errorf("a refused call spoilt the process: %v", err)
	}
	p.quit()
}

func TestInheritRefusesWhatIsNoSocketOfItsKind(t *testing.T) {
	packet, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s"), Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer packet.Close()
	f, err := packet.File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for _, f := range []*os.File{f, null} {
		fd, err := unix.Dup(int(f.Fd()))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := inheritListener(uintptr(fd), "s", "unix"); err == nil {
			t.Errorf("%s is taken for a stream socket", f.Name())
		}
	}
}
