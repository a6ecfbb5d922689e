package hostvm

import (
	"context"
	"fmt"
	"hash/fnv"
	"math"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	qemuBinary = "qemu-system-x86_64"
	qemuMajor  = 10 // 7.2 freezes under nested virtualisation

	guestAddress = "10.0.2.15" // the one address QEMU's user networking gives
	execPort     = 1020        // of the exec server inside
)

// The kernel command line of the emulated host. The time stamp counter is the real machine's, so it is reliable.
const hostCommandLine = "console=ttyS0 quiet panic=-1 nokaslr mitigations=off cryptomgr.notests random.trust_cpu=on " +
	"tsc=reliable no5lvl 8250.nr_uarts=1"

// machine is what QEMU is told.
type machine struct {
	name      string
	memoryMiB int
	cpus      int
	kernel    string
	initrd    string
	console   string
	dataDisk  string
	imageDisk string // "": none
	forwards  []Forward
}

// arguments is the QEMU command line of a machine: AMD-V with nested paging under multi-threaded software emulation, no
// default devices, no monitor, and a network that reaches nothing but the forwarded ports.
func (m machine) arguments() []string {
	netdev := "user,id=net,restrict=on,ipv6=off"
	for _, f := range m.forwards {
		netdev += fmt.Sprintf(",hostfwd=tcp:127.0.0.1:%d-%s:%d", f.Host, guestAddress, f.Guest)
	}
	args := []string{
		"-name", "torpor-hostvm-" + m.name,
		"-machine", "q35,usb=off,smbus=off,sata=off,vmport=off,i8042=off",
		"-accel", "tcg,thread=multi,tb-size=512",
		"-cpu", "max,la57=off",
		"-smp", strconv.Itoa(m.cpus),
		"-m", strconv.Itoa(m.memoryMiB),
		"-nodefaults", "-no-user-config", "-nographic", "-no-reboot", "-monitor", "none",
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny",
		"-chardev", "file,id=console,append=on,path=" + quote(m.console), "-serial", "chardev:console",
		"-kernel", m.kernel, "-initrd", m.initrd, "-append", hostCommandLine,
		"-netdev", netdev, "-device", "virtio-net-pci,netdev=net,romfile=",
	}
	args = append(args, disk("data", m.dataDisk, "discard=unmap,detect-zeroes=unmap")...)
	if m.imageDisk != "" {
		args = append(args, disk("images", m.imageDisk, "readonly=on")...)
	}
	return args
}

func disk(serial, path, options string) []string {
	return []string{
		"-drive", "if=none,format=raw,id=" + serial + "," + options + ",file=" + quote(path),
		"-device", "virtio-blk-pci,drive=" + serial + ",serial=" + serial,
	}
}

// pinned answers the program and arguments that run QEMU on one processor of this machine, whatever the number of those it
// emulates. Free to use two, QEMU 10.0 now and then let nested guests hang for seconds or triple-fault, mostly on a busy
// machine, down to a guest of a few dozen instructions without interrupts. None was seen to on one, but they are rare enough
// that this proves little, and the cause is not established. A suspect: QEMU changes CPUState.interrupt_request on VMRUN and
// on a nested exit with an instruction that is not locked, while other threads set bits in the same word; one processor
// cannot tear it.
func (m machine) pinned(qemu string) (string, []string, error) {
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		return "", nil, fmt.Errorf("ask which processors QEMU may use: %w", err)
	}
	var cpus []string
	for cpu := 0; len(cpus) < allowed.Count(); cpu++ {
		if allowed.IsSet(cpu) {
			cpus = append(cpus, strconv.Itoa(cpu))
		}
	}
	name := fnv.New32a()
	_, _ = name.Write([]byte(m.name)) // never fails; spreads machines that run side by side
	cpu := cpus[name.Sum32()%uint32(len(cpus))]
	return "taskset", append([]string{"-c", cpu, qemu}, m.arguments()...), nil
}

// quote protects a value inside a QEMU option list, where a comma ends it unless doubled.
func quote(s string) string { return strings.ReplaceAll(s, ",", ",,") }

// findQEMU answers the path of a QEMU that is new enough.
func findQEMU(ctx context.Context) (string, error) {
	path, err := exec.LookPath(qemuBinary)
	if err != nil {
		return "", fmt.Errorf("%s is not installed: run tools/setup/deps.sh", qemuBinary)
	}
	out, err := output(ctx, "", path, "--version")
	if err != nil {
		return "", err
	}
	major, err := qemuVersion(out)
	if err != nil {
		return "", err
	}
	if major < qemuMajor {
		return "", fmt.Errorf("QEMU %d is too old, %d or newer is needed: run tools/setup/deps.sh", major, qemuMajor)
	}
	return path, nil
}

// qemuVersion finds the major version in "QEMU emulator version 10.0.2 (...)".
func qemuVersion(text string) (major int, err error) {
	_, rest, ok := strings.Cut(text, "version ")
	number, _, dot := strings.Cut(rest, ".")
	if ok && dot {
		major, err = strconv.Atoi(number)
	}
	if !ok || !dot || err != nil {
		return 0, fmt.Errorf("QEMU does not say its version: %q", strings.TrimSpace(text))
	}
	return major, nil
}

// startWrapped starts a program in a session of its own, so that it outlives us, with its process id and start time in
// pidFile before it runs its first instruction. Its output goes to logFile.
func startWrapped(pidFile, logFile, program string, args []string) (*exec.Cmd, error) {
	log, err := os.OpenFile(logFile, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	// A descriptor that we inherited (a lock somebody holds around us, a pipe that a caller waits on) must not live as long
	// as the machine does. Go opens its own for us alone; this makes the others so too.
	if err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return nil, fmt.Errorf("keep descriptors from QEMU: %w", err)
	}
	cmd := exec.Command("/bin/sh", append([]string{"-c", wrapper, "sh", pidFile, program}, args...)...)
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true}
	return cmd, cmd.Start()
}
