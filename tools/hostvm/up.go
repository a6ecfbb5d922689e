package hostvm

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/rs/zerolog"

	"torpor/images/imageset"
)

// Config says how to start an instance. The zero value of a number means its default.
type Config struct {
	Log       zerolog.Logger
	Cache     string    // where kernels are kept
	Bin       string    // directory of the project's binaries; all but torpor-hostvm's own go into the machine
	Images    string    // directory of an image set; "": none
	MemoryMiB int       // 6144
	CPUs      int       // 1: they share one real processor anyway, see machine.pinned
	DataGiB   int       // 20: size of the persistent disk, when it is made
	Forwards  []Forward // ports to reach
}

func (c Config) withDefaults() Config {
	if c.MemoryMiB == 0 {
		c.MemoryMiB = 6144
	}
	if c.CPUs == 0 {
		c.CPUs = 1
	}
	if c.DataGiB == 0 {
		c.DataGiB = 20
	}
	return c
}

func (c Config) validate() error {
	var errs []error
	if c.MemoryMiB < 512 {
		errs = append(errs, fmt.Errorf("memory of %d MiB: 512 is the least", c.MemoryMiB))
	}
	if c.CPUs < 1 || c.CPUs > 32 {
		errs = append(errs, fmt.Errorf("%d processors: 1 to 32", c.CPUs))
	}
	if c.DataGiB < 1 {
		errs = append(errs, fmt.Errorf("data disk of %d GiB: 1 is the least", c.DataGiB))
	}
	if c.Bin == "" {
		errs = append(errs, errors.New("the directory of binaries is required"))
	}
	for _, f := range c.Forwards {
		if f.Host < 0 || f.Host > 65535 || f.Guest < 1 || f.Guest > 65535 {
			errs = append(errs, fmt.Errorf("forward %d:%d is not a pair of ports", f.Host, f.Guest))
		}
	}
	return errors.Join(errs...)
}

const (
	bootBudget = 3 * time.Minute // from QEMU's start until commands run; 6 s on an idle machine
	freeMargin = 2 << 30         // bytes that must be free on disk beyond what start-up itself writes
)

// Up starts the machine and returns when commands run in it. If it runs already, Up only brings changed binaries into
// it (the rest of c is then not looked at; Status tells how it was started). When it fails, nothing keeps running.
func (i *Instance) Up(ctx context.Context, c Config) error {
	c = c.withDefaults()
	if err := c.validate(); err != nil {
		return err
	}
	if err := os.MkdirAll(i.dir, 0o700); err != nil {
		return err
	}
	l, err := lock(ctx, i.path("lock"))
	if err != nil {
		return err
	}
	defer l.Close()

	st, p, err := i.running()
	switch {
	case err == nil:
		if err := i.awaitReady(ctx, p); err != nil {
			return err
		}
		st.FirstProc = i.bootStage().firstProcess // its launcher may have died before it could write it down
		return i.refresh(ctx, c, st)
	case !errors.Is(err, ErrDown):
		// It runs, but its launcher died before it wrote down how to reach it.
		if err := p.stop(ctx); err != nil {
			return err
		}
	}
	st, m, err := i.prepare(ctx, c)
	if err != nil {
		return err
	}
	return i.start(ctx, st, m)
}

// prepare makes the files the machine starts from.
func (i *Instance) prepare(ctx context.Context, c Config) (*state, machine, error) {
	fail := func(err error) (*state, machine, error) { return nil, machine{}, err }
	image, modules, err := findKernel(ctx, c.Log, c.Cache)
	if err != nil {
		return fail(err)
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return fail(errors.New("busybox is not installed: run tools/setup/deps.sh"))
	}
	binaries, digest, err := listBinaries(c.Bin)
	if err != nil {
		return fail(err)
	}
	st := &state{
		Token: newToken(), Binaries: digest, MemoryMiB: c.MemoryMiB, CPUs: c.CPUs,
		Started: time.Now().UTC().Truncate(time.Second),
	}
	disks := map[string]string{"data": guestData}
	if st.ImageDisk, st.Images, err = i.imageDisk(ctx, c.Images, disks); err != nil {
		return fail(err)
	}
	if err := needFree(i.dir, freeMargin); err != nil {
		return fail(err)
	}
	if err := makeDataDisk(ctx, i.path("data.img"), c.DataGiB); err != nil {
		return fail(err)
	}
	if st.ExecPort, st.Forwards, err = pickPorts(c.Forwards); err != nil {
		return fail(err)
	}
	err = writeInitrd(ctx, i.path("initrd"), initrdSpec{
		modules: modules, busybox: busybox, bin: c.Bin, binaries: binaries,
		settings: guestSettings{
			Hostname: "torpor-" + i.name, Listen: fmt.Sprintf("%s:%d", guestAddress, execPort), Token: st.Token, Disks: disks,
		},
	})
	if err != nil {
		return fail(err)
	}
	return st, machine{
		name: i.name, memoryMiB: c.MemoryMiB, cpus: c.CPUs, kernel: image, initrd: i.path("initrd"), console: i.Console(),
		dataDisk: i.path("data.img"), imageDisk: st.ImageDisk,
		forwards: append([]Forward{{Host: st.ExecPort, Guest: execPort}}, st.Forwards...),
	}, nil
}

// imageDisk makes the disk of an image set, if there is one, and adds its place to disks.
func (i *Instance) imageDisk(ctx context.Context, dir string, disks map[string]string) (path, digest string, err error) {
	if dir == "" {
		return "", "", nil
	}
	set, err := imageset.Read(dir)
	if err != nil {
		return "", "", err
	}
	// Two instances may start at once; the disk is made once.
	l, err := lock(ctx, filepath.Join(i.root, "images.lock"))
	if err != nil {
		return "", "", err
	}
	defer l.Close()
	path, err = makeImageDisk(ctx, i.root, dir, set)
	disks["images"] = guestData + "/images/" + set.Name
	return path, set.Digest, err
}

func pickPorts(wanted []Forward) (execPort int, forwards []Forward, err error) {
	for _, f := range wanted {
		if f.Host, err = pickPort(f.Host); err != nil {
			return 0, nil, err
		}
		forwards = append(forwards, f)
	}
	execPort, err = pickPort(0)
	return execPort, forwards, err
}

// start runs QEMU and waits until commands run in the machine.
func (i *Instance) start(ctx context.Context, st *state, m machine) (err error) {
	qemu, err := findQEMU(ctx)
	if err != nil {
		return err
	}
	program, args, err := m.pinned(qemu)
	if err != nil {
		return err
	}
	if err := os.Rename(i.Console(), i.Console()+".1"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := writeState(i.path(stateFile), st); err != nil {
		return err
	}
	cmd, err := startWrapped(i.path("qemu.pid"), i.path("qemu.log"), program, args)
	if err != nil {
		return fmt.Errorf("start QEMU: %w", err)
	}
	go func() { _ = cmd.Wait() }() // only so that it is no zombie while we live; it ends with QEMU or with us
	p, err := i.awaitPID(ctx, cmd.Process.Pid)
	if err == nil {
		err = i.awaitReady(ctx, p)
	}
	if err != nil {
		stop := context.WithoutCancel(ctx) // the caller may have given up, but nothing must stay behind
		return errors.Join(err, p.stop(stop), i.tidy())
	}
	st.FirstProc = i.bootStage().firstProcess
	return writeState(i.path(stateFile), st)
}

// awaitPID waits for the wrapper to write the pid file.
func (i *Instance) awaitPID(ctx context.Context, pid int) (process, error) {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); {
		if p, ok, err := readPID(i.path("qemu.pid")); err != nil || ok && p.pid == pid {
			return p, err
		}
		select {
		case <-ctx.Done():
			return process{}, ctx.Err()
		case <-tick.C:
		}
	}
	return process{}, errors.New("QEMU's start-up shell did not write its process number")
}

func (i *Instance) bootStage() bootStage {
	text, err := os.ReadFile(i.Console())
	if err != nil {
		return bootStage{} // not written yet
	}
	return parseConsole(text)
}

// awaitReady waits until the exec channel answers, and says in one sentence why it never will.
func (i *Instance) awaitReady(ctx context.Context, p process) error {
	ctx, cancel := context.WithTimeoutCause(ctx, bootBudget, fmt.Errorf("not ready after %v", bootBudget))
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	said := "" // of the last attempt
	for {
		b := i.bootStage()
		switch {
		case b.fatal != "":
			return fmt.Errorf("emulated host: %s", b.fatal)
		case b.ready:
			code, err := i.Exec(ctx, "true", nil, io.Discard, io.Discard)
			if err == nil && code == 0 {
				return nil
			}
			said = fmt.Sprintf("exec answered %d, %v; ", code, err)
		}
		if !p.alive() {
			return i.whyEnded()
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("emulated host: %w; %s%s", context.Cause(ctx), said, lastWords(i.Console()))
		case <-tick.C:
		}
	}
}

// whyEnded says what QEMU or the kernel in it complained of.
func (i *Instance) whyEnded() error {
	if b, err := tail(i.path("qemu.log"), 2<<10); err == nil {
		lines := strings.Split(strings.TrimSpace(string(b)), "\n")
		if last := lines[len(lines)-1]; last != "" {
			return fmt.Errorf("QEMU ended: %s", last)
		}
	}
	return fmt.Errorf("emulated host ended while starting: %s", lastWords(i.Console()))
}

// listBinaries names the files of dir that go into a machine, with a digest of their sizes and times.
func listBinaries(dir string) (names []string, digest string, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, "", fmt.Errorf("binaries: %w", err)
	}
	h := sha256.New()
	for _, e := range entries {
		if !e.Type().IsRegular() || strings.HasPrefix(e.Name(), "torpor-hostvm") {
			continue
		}
		st, err := e.Info()
		if err != nil {
			return nil, "", err
		}
		names = append(names, e.Name())
		fmt.Fprintf(h, "%s %d %d\n", e.Name(), st.Size(), st.ModTime().UnixNano())
	}
	return names, fmt.Sprintf("%x", h.Sum(nil)[:6]), nil
}

// refresh brings binaries that were built since into the running machine. What runs keeps its old one until it is
// started again.
func (i *Instance) refresh(ctx context.Context, c Config, st *state) error {
	names, digest, err := listBinaries(c.Bin)
	if err != nil {
		return err
	}
	if digest == st.Binaries {
		names = nil
	}
	for _, n := range names {
		if err := i.Push(ctx, filepath.Join(c.Bin, n), guestBin+"/"+n); err != nil {
			return err
		}
	}
	st.Binaries = digest
	return writeState(i.path(stateFile), st)
}
