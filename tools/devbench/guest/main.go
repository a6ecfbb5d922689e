// Command guest is the first and only process of the machines that devbench measures: it loads the virtio drivers, runs the
// workloads named on the kernel's command line (devbench=block,vsock,net), tells every figure on the console in a line that
// begins with "devbench:", and resets the machine.
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"time"

	"github.com/mdlayher/vsock"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"torpor/images/initramfs"
	"torpor/tools/devbench/peer"
)

// Sizes of the workloads.
const (
	bulkBytes   = 48 << 20
	blockBytes  = 1 << 20
	randomBytes = 4 << 10
	randoms     = 1500
	roundTrips  = 1500
)

// Addresses of the network between guest and host.
const (
	guestAddress = "10.77.0.2/24"
	hostAddress  = "10.77.0.1"
)

func main() {
	if err := run(); err != nil {
		say("error %v", err)
	}
	say("done")
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART) // does not return
	for {
		time.Sleep(time.Hour)
	}
}

func say(format string, args ...any) { fmt.Printf("devbench: "+format+"\n", args...) }

func run() error {
	for _, m := range []struct{ kind, at string }{{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}} {
		if err := unix.Mount(m.kind, m.at, m.kind, 0, ""); err != nil && err != unix.EBUSY {
			return fmt.Errorf("mounting %s: %w", m.at, err)
		}
	}
	if err := loadModules(); err != nil {
		return err
	}
	cmdline, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return err
	}
	say("booted")
	time.Sleep(2 * time.Second) // the host reads its counters meanwhile
	for word := range strings.FieldsSeq(string(cmdline)) {
		list, ok := strings.CutPrefix(word, "devbench=")
		for _, what := range strings.Split(list, ",") {
			if ok && what != "" {
				if err := workload(what); err != nil {
					return fmt.Errorf("%s: %w", what, err)
				}
			}
		}
	}
	return nil
}

func workload(what string) error {
	switch what {
	case "block":
		return block()
	case "vsock":
		return stream("vsock", func() (net.Conn, error) { return vsock.Dial(vsock.Host, peer.Port, nil) })
	case "net":
		if err := configure(); err != nil {
			return err
		}
		return stream("net", func() (net.Conn, error) {
			return (&net.Dialer{Timeout: time.Minute}).DialContext(context.Background(), "tcp", net.JoinHostPort(hostAddress, fmt.Sprint(peer.Port)))
		})
	}
	return fmt.Errorf("unknown workload")
}

func loadModules() error {
	f, err := os.Open(initramfs.OrderPath)
	if err != nil {
		return err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		m, err := os.Open(lines.Text())
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(m.Fd()), "", 0)
		m.Close()
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("loading %s: %w", lines.Text(), err)
		}
	}
	return lines.Err()
}

// timed tells what f did in units per second.
func timed(name, unit string, amount float64, f func() error) error {
	began := time.Now()
	if err := f(); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	say("%s %.3f %s/s %g", name, amount/time.Since(began).Seconds(), unit, amount)
	return nil
}

// block reads and writes the first disk past the guest's page cache.
func block() error {
	var fd int
	var err error
	for range 100 { // the driver's node appears a moment after the module is in
		if fd, err = unix.Open("/dev/vda", unix.O_RDWR|unix.O_DIRECT, 0); err == nil {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	buf, err := unix.Mmap(-1, 0, blockBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return err
	}
	for i := range buf {
		buf[i] = byte(i)
	}
	sequential := func(op func(int, []byte, int64) (int, error)) func() error {
		return func() error {
			for off := int64(0); off < bulkBytes; off += blockBytes {
				if _, err := op(fd, buf, off); err != nil {
					return err
				}
			}
			return unix.Fdatasync(fd)
		}
	}
	random := func(op func(int, []byte, int64) (int, error)) func() error {
		return func() error {
			for i, x := 0, uint64(1); i < randoms; i++ {
				x = x*6364136223846793005 + 1442695040888963407
				if _, err := op(fd, buf[:randomBytes], int64(x>>33%(bulkBytes/randomBytes))*randomBytes); err != nil {
					return err
				}
			}
			return unix.Fdatasync(fd)
		}
	}
	for _, t := range []struct {
		name, unit string
		amount     float64
		f          func() error
	}{
		{"block-read-first", "MiB", bulkBytes >> 20, sequential(unix.Pread)},
		{"block-read-sequential", "MiB", bulkBytes >> 20, sequential(unix.Pread)},
		{"block-write-sequential", "MiB", bulkBytes >> 20, sequential(unix.Pwrite)},
		{"block-read-random", "op", randoms, random(unix.Pread)},
		{"block-write-random", "op", randoms, random(unix.Pwrite)},
	} {
		if err := timed(t.name, t.unit, t.amount, t.f); err != nil {
			return err
		}
	}
	return nil
}

// stream measures a connection to the host.
func stream(name string, dial func() (net.Conn, error)) error {
	c, err := dial()
	if err != nil {
		return err
	}
	defer c.Close()
	var one [1]byte
	if err := timed(name+"-to-host", "MiB", bulkBytes>>20, func() error {
		if err := peer.Ask(c, peer.Sink, bulkBytes); err != nil {
			return err
		}
		if err := peer.Send(c, bulkBytes); err != nil {
			return err
		}
		_, err := io.ReadFull(c, one[:])
		return err
	}); err != nil {
		return err
	}
	if err := timed(name+"-to-guest", "MiB", bulkBytes>>20, func() error {
		if err := peer.Ask(c, peer.Give, bulkBytes); err != nil {
			return err
		}
		return peer.Receive(c, bulkBytes)
	}); err != nil {
		return err
	}
	return timed(name+"-round-trips", "op", roundTrips, func() error {
		if err := peer.Ask(c, peer.Echo, roundTrips); err != nil {
			return err
		}
		for range roundTrips {
			if _, err := c.Write(one[:]); err != nil {
				return err
			}
			if _, err := io.ReadFull(c, one[:]); err != nil {
				return err
			}
		}
		return nil
	})
}

// configure gives the first network device its address.
func configure() error {
	link, err := netlink.LinkByName("eth0")
	if err != nil {
		return err
	}
	addr, err := netlink.ParseAddr(guestAddress)
	if err != nil {
		return err
	}
	if err := netlink.AddrAdd(link, addr); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	return netlink.LinkSetUp(link)
}
