package main

import (
	"bufio"
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
	"time"

	"github.com/mdlayher/vsock"
	"golang.org/x/sys/unix"

	"torpor/agent/guest"
	"torpor/images/imageset"
	"torpor/tools/qemupeer"
)

// qemu is the peer of a restore: the same kernel, image and shape in QEMU's microvm, warmed up alike, kept as a migration stream
// in a file and restored from there. The guest is reached over the kernel's vsock.
type qemu struct {
	archive string // where the program is
	dir     string // of its own files
	image   string // directory of the image set
	m       imageset.Manifest
	vcpus   int
	memory  uint64 // MiB

	bridge  net.Listener
	cmd     *exec.Cmd
	monitor string
}

const (
	qemuCID = 33 // global on a host, unlike ours
	// qemuRetry is how soon a guest that is not there yet is tried again.
	qemuRetry = 2 * time.Millisecond
)

// newQEMU boots the image, warms it up, and saves it.
func newQEMU(ctx context.Context, r *restorer, archive string) (_ *qemu, err error) {
	q := &qemu{
		archive: archive, dir: r.dir, image: filepath.Dir(r.template.RootFS), vcpus: int(r.template.VCPUs), memory: r.template.MemoryBytes >> 20,
	}
	if q.m, err = imageset.Read(q.image); err != nil {
		return nil, err
	}
	if err := qemupeer.LoadModules(ctx, archive); err != nil {
		return nil, err
	}
	if err := sparseCopy(q.in("qemu.disk"), r.template.RootFS, q.m.DiskBytes); err != nil {
		return nil, err
	}
	if q.bridge, err = net.Listen("unix", q.in("qemu.vsock")); err != nil {
		return nil, err
	}
	go q.serve() // ends with the listener
	defer func() { err = errors.Join(err, q.stop()) }()
	hello, err := guest.ListenHello(q.in("qemu.vsock"))
	if err != nil {
		return nil, err
	}
	defer hello.Close()
	if err := q.start("-append", q.m.Cmdline); err != nil {
		return nil, err
	}
	if _, err := hello.Wait(ctx); err != nil {
		return nil, err
	}
	g := guest.At(q.in("qemu.vsock"))
	if err := g.WarmUp(ctx); err != nil {
		return nil, err
	}
	contact, err := g.Connect(ctx)
	if err != nil {
		return nil, err
	}
	err = contact.Sync(ctx)
	contact.Close()
	if err != nil {
		return nil, err
	}
	return q, q.save(ctx)
}

func (q *qemu) in(name string) string { return filepath.Join(q.dir, name) }

func (q *qemu) close() { _ = q.bridge.Close() } // its guests are stopped by then

// start starts QEMU with the arguments that boot and restore share, and more.
func (q *qemu) start(more ...string) error {
	snapshot := "on" // what a restored guest writes must not be there for the next
	if more[0] == "-append" {
		snapshot = "off"
	}
	q.monitor = q.in("qemu.monitor")
	_ = os.Remove(q.monitor)
	q.cmd = qemupeer.Command(q.archive, append([]string{
		"-M", "microvm,acpi=on,rtc=off,pit=off,pic=off,isa-serial=on", "-accel", "kvm", "-cpu", "host",
		"-smp", strconv.Itoa(q.vcpus), "-m", strconv.FormatUint(q.memory, 10),
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "file:" + q.in("qemu.console"),
		"-monitor", "unix:" + q.monitor + ",server=on,wait=off",
		"-kernel", filepath.Join(q.image, q.m.Vmlinux), "-initrd", filepath.Join(q.image, q.m.Initrd),
		"-drive", "if=none,id=d,format=raw,snapshot=" + snapshot + ",file=" + q.in("qemu.disk"), "-device", "virtio-blk-device,drive=d,serial=root",
		"-device", fmt.Sprintf("vhost-vsock-device,guest-cid=%d", qemuCID),
		"-device", "virtio-rng-device", "-device", "virtio-balloon-device",
	}, more...)...)
	q.cmd.Env = append(os.Environ(), "TMPDIR="+q.dir)
	return q.cmd.Start()
}

func (q *qemu) stop() error {
	if q.cmd == nil {
		return nil
	}
	_ = q.cmd.Process.Kill() // it may have ended
	_ = q.cmd.Wait()         // killed, most likely
	q.cmd = nil
	return nil
}

// save writes the migration stream of the running guest.
func (q *qemu) save(ctx context.Context) error {
	conn, err := net.Dial("unix", q.monitor)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	if _, err := fmt.Fprintf(conn, "migrate_set_parameter max-bandwidth 100G\nmigrate file:%s\n", q.in("qemu.stream")); err != nil {
		return err
	}
	tick := time.NewTicker(time.Second) // the monitor is for people: it tells of the end when asked
	defer tick.Stop()
	go func() {
		for range tick.C {
			if _, err := io.WriteString(conn, "info migrate\n"); err != nil {
				return
			}
		}
	}()
	for lines := bufio.NewScanner(conn); lines.Scan(); {
		switch line := lines.Text(); {
		case strings.Contains(line, "completed"):
			return nil
		case strings.Contains(line, "failed"), strings.Contains(line, "Error"):
			return fmt.Errorf("saving QEMU's guest: %s", line)
		}
	}
	return errors.Join(errors.New("QEMU's guest could not be saved"), ctx.Err())
}

// measure restores it up to the output of a first command.
func (q *qemu) measure(ctx context.Context, v variant) (s sample) {
	s = sample{scenario: v.name}
	w := watch{}
	s.err = q.restore(ctx, v, &w)
	s.phases, s.total = w.phases, w.total()
	return s
}

func (q *qemu) restore(ctx context.Context, v variant, w *watch) (err error) {
	if err := settle(ctx, v.cold); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, q.stop()) }()
	w.began = time.Now()
	if err := q.start("-incoming", "file:"+q.in("qemu.stream")); err != nil {
		return err
	}
	w.lap("vmm")
	return ready(ctx, guest.At(q.in("qemu.vsock")), w)
}

// serve makes the kernel's vsock look like that of torpor-vmm.
func (q *qemu) serve() {
	for {
		conn, err := q.bridge.Accept()
		if err != nil {
			return
		}
		go func() {
			defer conn.Close()
			if err := q.relay(conn); err != nil {
				fmt.Fprintln(os.Stderr, "vsock of QEMU:", err)
			}
		}()
	}
}

func (q *qemu) relay(host net.Conn) error {
	order, port := "", uint32(0)
	if _, err := fmt.Fscanf(host, "%s %d\n", &order, &port); err != nil {
		return err
	}
	peer, answer, err := q.peer(order, port)
	if err != nil {
		return err
	}
	defer peer.Close()
	if _, err := io.WriteString(host, answer); err != nil {
		return err
	}
	go func() {
		_, _ = io.Copy(peer, host) // either end may go at any time
		peer.Close()
	}()
	_, _ = io.Copy(host, peer)
	return nil
}

// peer is the guest's end of a connection.
func (q *qemu) peer(order string, port uint32) (net.Conn, string, error) {
	if order == "LISTEN" {
		l, err := vsock.ListenContextID(vsock.Host, port, nil)
		if err != nil {
			return nil, "", err
		}
		defer l.Close()
		conn, err := l.Accept()
		return conn, "OK\n", err
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(qemuRetry) {
		conn, err := vsock.Dial(qemuCID, port, nil)
		if err == nil {
			return conn, "OK 1\n", nil
		}
		if time.Now().After(end) {
			return nil, "", err
		}
	}
}

// sparseCopy copies what is in a file, not its holes, and makes it larger.
func sparseCopy(to, from string, size int64) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	defer out.Close()
	for at := int64(0); ; {
		start, err := in.Seek(at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return errors.Join(out.Truncate(size), out.Close())
		}
		if err != nil {
			return err
		}
		if at, err = in.Seek(start, unix.SEEK_HOLE); err != nil {
			return err
		}
		if _, err := io.Copy(io.NewOffsetWriter(out, start), io.NewSectionReader(in, start, at-start)); err != nil {
			return err
		}
	}
}
