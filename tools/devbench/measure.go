package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"torpor/tools/devbench/peer"
	"torpor/tools/qemupeer"
)

const (
	torporName = "torpor-vmm"
	peerName   = "qemu"
	exitsUnit  = "exits"
	memoryMiB  = 512
	diskBytes  = 64 << 20

	// bootCmdline is that of the guest image, less what only its root needs. A reset is a triple fault: both VMMs end then.
	bootCmdline = "console=ttyS0 8250.nr_uarts=1 quiet loglevel=1 reboot=t panic=-1 cryptomgr.notests random.trust_cpu=on tsc=reliable " +
		"clocksource=kvm-clock i8042.noaux i8042.nokbd swiotlb=noforce mitigations=off"

	runBudget = 10 * time.Minute // of one boot with all workloads, on an emulated host
)

// vmm is one of the two.
type vmm interface {
	// start boots the guest with its console going to a file, and serves its vsock connections to the peer's port; the process
	// can be looked at by pid, and has ended when the channel is closed.
	start(ctx context.Context, console, cmdline string) (pid int, ended <-chan struct{}, err error)
	// stop ends what is left of it.
	stop(ctx context.Context) error
}

// measure writes one figure a line.
func measure(ctx context.Context, o options, w io.Writer) error {
	if err := prepare(ctx, o.onHost); err != nil {
		return err
	}
	net, err := newNetwork()
	if err != nil {
		return err
	}
	defer net.close()
	ours, err := newTorpor(o.onHost, net)
	if err != nil {
		return err
	}
	for round := range o.rounds {
		for _, v := range []struct {
			name string
			vmm  vmm
		}{{torporName, ours}, {peerName, newQEMU(o.onHost, net)}} {
			fmt.Fprintf(os.Stderr, "round %d of %d: %s\n", round+1, o.rounds, v.name)
			figures, err := once(ctx, v.name, v.vmm, o)
			if err != nil {
				return fmt.Errorf("%s: %w", v.name, err)
			}
			for _, f := range figures {
				fmt.Fprintln(w, f)
			}
		}
	}
	return nil
}

// prepare makes the disk both use and loads the peer's drivers.
func prepare(ctx context.Context, dir string) error {
	f, err := os.Create(filepath.Join(dir, diskName))
	if err != nil {
		return err
	}
	_, err = io.CopyN(f, rand.Reader, diskBytes)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if _, err := os.Stat(debugfs); err != nil {
		if out, err := exec.CommandContext(ctx, "mount", "-t", "debugfs", "none", "/sys/kernel/debug").CombinedOutput(); err != nil {
			return fmt.Errorf("mounting debugfs: %w: %s", err, out)
		}
	}
	return qemupeer.LoadModules(ctx, dir)
}

// once boots one machine and lets it work to its end.
func once(ctx context.Context, name string, v vmm, o options) (figures []figure, err error) {
	ctx, cancel := context.WithTimeout(ctx, runBudget)
	defer cancel()
	console := filepath.Join(o.onHost, "console.log")
	if err := os.WriteFile(console, nil, 0o600); err != nil {
		return nil, err
	}
	pid, ended, err := v.start(ctx, console, bootCmdline+" devbench="+o.workloads)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, v.stop(context.WithoutCancel(ctx))) }()
	if _, err := awaitLine(ctx, console, ended, "booted", nil); err != nil {
		return nil, err
	}
	if figures, err = exits(name, pid); err != nil {
		return nil, err
	}
	var each func(text string) error
	if o.profile {
		if each, err = profile(name, pid); err != nil {
			return nil, err
		}
	}
	text, err := awaitLine(ctx, console, ended, "done", each)
	if err != nil {
		return nil, err
	}
	more, err := guestFigures(name, text)
	return append(figures, more...), err
}

// serve answers the guest's connections until the listener is closed.
func serve(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			if err := peer.Serve(c); err != nil {
				fmt.Fprintln(os.Stderr, "a connection of the guest:", err)
			}
		}()
	}
}

// awaitLine reads the console until the guest has said a word, and returns all of it. each, if there is one, is shown what is
// there so far.
func awaitLine(ctx context.Context, console string, ended <-chan struct{}, word string, each func(text string) error) (string, error) {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		over := false
		select {
		case <-tick.C:
		case <-ended:
			over = true
		case <-ctx.Done():
			return "", fmt.Errorf("waiting for the guest to say %q: %w", word, ctx.Err())
		}
		text, err := os.ReadFile(console)
		if err != nil {
			return "", err
		}
		if each != nil {
			if err := each(string(text)); err != nil {
				return "", err
			}
		}
		if strings.Contains(string(text), said+word) {
			return string(text), nil
		}
		if over {
			return "", fmt.Errorf("the machine ended before its guest said %q; its console ends in: %.2000s", word, tail(string(text)))
		}
	}
}

func tail(text string) string { return text[max(0, len(text)-2000):] }

// said begins the lines of the guest.
const said = "devbench: "

// guestFigures reads what the guest measured.
func guestFigures(name, console string) ([]figure, error) {
	var out []figure
	for line := range strings.Lines(console) {
		rest, ok := strings.CutPrefix(strings.TrimSpace(line), said)
		fields := strings.Fields(rest)
		switch {
		case !ok || len(fields) == 0 || fields[0] == "booted" || fields[0] == "done":
			continue
		case fields[0] == "error":
			return nil, fmt.Errorf("the guest says: %s", rest)
		case len(fields) != 4:
			return nil, fmt.Errorf("the guest says %q", rest)
		}
		v, err := strconv.ParseFloat(fields[1], 64)
		if err != nil {
			return nil, err
		}
		n, err := strconv.ParseFloat(fields[3], 64)
		if err != nil {
			return nil, err
		}
		out = append(out, figure{vmm: name, name: fields[0], unit: fields[2], value: v, amount: n})
	}
	return out, nil
}

// debugfs is where KVM counts, in a directory for each VM whose name begins with the id of the thread that made it.
const debugfs = "/sys/kernel/debug/kvm"

// exits reads the counters of a VM up to now.
func exits(name string, pid int) ([]figure, error) {
	dir, err := kvmCounters(pid)
	if err != nil {
		return nil, err
	}
	var out []figure
	for _, counter := range []string{"exits", "io_exits", "mmio_exits"} {
		n, err := readNumber(filepath.Join(dir, counter))
		if err != nil {
			return nil, err
		}
		out = append(out, figure{vmm: name, name: "boot-" + strings.ReplaceAll(counter, "_", "-"), unit: exitsUnit, value: n})
	}
	return out, nil
}

// kvmCounters is the directory where KVM counts for the one VM of a process.
func kvmCounters(pid int) (string, error) {
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return "", err
	}
	var dirs []string
	for _, t := range threads {
		more, err := filepath.Glob(fmt.Sprintf("%s/%s-*", debugfs, t.Name()))
		if err != nil {
			return "", err
		}
		dirs = append(dirs, more...)
	}
	if len(dirs) != 1 {
		return "", fmt.Errorf("KVM counts for process %d in %d directories", pid, len(dirs))
	}
	return dirs[0], nil
}
