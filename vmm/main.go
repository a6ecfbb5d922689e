// Torpor-vmm is one virtual machine: a process that boots or restores a guest under KVM and serves the agent's orders
// (api/vmmpb) over ttrpc on a unix socket. It outlives the agent that started it and ends by Quit, by SIGTERM, or a minute
// after its guest has ended.
//
// The agent makes the sockets, listening, and the process inherits them: descriptor 3 is the one for orders, 4 the one for the
// files orders are about (api/fdpass), 5 the one for connections to the guest (virtio.Vsock). Descriptor 6 is /dev/kvm, and the
// log goes to standard error. What it needs of /proc it opens first of all. From then on it is locked (package jail): once it
// serves it opens nothing by path, nor any socket. The agent starts it in a jail, by arguments of their own; outside one it
// works too.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"slices"
	"syscall"
	"time"

	"github.com/containerd/ttrpc"

	"torpor/api/fdpass"
	"torpor/api/vmmpb"
	"torpor/vmm/jail"
	"torpor/vmm/kvm"
	"torpor/vmm/machine"
	"torpor/vmm/virtio"
)

// The inherited descriptors.
const (
	controlFD = 3 + iota // stream socket
	filesFD              // seqpacket socket
	vsockFD              // stream socket
	kvmFD                // /dev/kvm
)

const (
	// lingerAfterEnd is how long the process stays to answer Wait and Status when its guest has ended.
	lingerAfterEnd = 60 * time.Second
	// settleTime is when a machine that was made is no longer new: the first requests after a wake are over.
	settleTime = 5 * time.Second
	// answerTime is how long answers under way may take to leave at the end.
	answerTime = 2 * time.Second

	// processors serve devices and RPC. Each thread of the machine that waits inside system calls gets one more: without, the
	// runtime would take the processor away from one of them at every occasion, looking for such an occasion every 20 microseconds.
	processors = 2

	// Small heaps: what is large here is guest memory, which the collector does not see.
	gcPercent = 50
	heapLimit = 16 << 20
)

func main() {
	if spec, asked, err := jail.Asked(os.Args[1:]); asked {
		if err == nil {
			spec.Args = append([]string{"--kvm", machine.KVMModule()}, spec.Args...) // which cannot be seen from inside
			err = jail.Enter(spec)
		}
		fail(err)
	}
	dir := flag.String(machineFlag, "", "the `directory` of the machine's sockets, by which the process is found; nothing is opened there (required)")
	module := flag.String("kvm", "", "the kernel `module` behind /dev/kvm, which snapshots name; looked up if it is not given")
	flag.Parse()
	if *module == "" {
		*module = machine.KVMModule()
	}
	if err := run(*dir, *module, flag.Args()); err != nil {
		fail(err)
	}
}

func fail(err error) {
	_, _ = os.Stderr.WriteString("torpor-vmm: " + err.Error() + "\n")
	os.Exit(1)
}

func run(dir, module string, rest []string) error {
	if dir == "" || len(rest) > 0 {
		return errors.New("usage: torpor-vmm --machine DIR; it is torpor-agent that starts it, with sockets and /dev/kvm as descriptors 3 to 6")
	}
	runtime.GOMAXPROCS(processors)
	debug.SetGCPercent(gcPercent)
	debug.SetMemoryLimit(heapLimit)
	time.Local = time.UTC // or the first time stamp opens /etc/localtime
	log := newLog(dir)

	stop, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer cancel()
	signal.Ignore(syscall.SIGPIPE, syscall.SIGHUP) // a peer or the agent going away is not our end

	in, err := inherit(module)
	if err != nil {
		return err
	}
	if err := jail.Lock(slices.Concat(kvm.Requests(), virtio.TapRequests())); err != nil {
		return err
	}
	s := newServer(in.host, fdpass.NewInbox(in.files), in.vsock, log)
	return errors.Join(serve(stop, in.control, s), in.host.Close())
}

// inherited is what the process has to work with.
type inherited struct {
	control, files, vsock *net.UnixListener
	host                  *machine.Host
}

func inherit(module string) (in inherited, err error) {
	for _, s := range []struct {
		fd            uintptr
		name, network string
		to            **net.UnixListener
	}{
		{controlFD, "control socket", "unix", &in.control},
		{filesFD, "files socket", "unixpacket", &in.files},
		{vsockFD, "vsock socket", "unix", &in.vsock},
	} {
		if *s.to, err = inheritListener(s.fd, s.name, s.network); err != nil {
			return in, fmt.Errorf("%s, descriptor %d: %w", s.name, s.fd, err)
		}
	}
	dev := os.NewFile(kvmFD, "/dev/kvm")
	in.host, err = machine.OpenHost(dev, module)
	return in, errors.Join(err, dev.Close()) // the host has a copy
}

func inheritListener(fd uintptr, name, network string) (*net.UnixListener, error) {
	f := os.NewFile(fd, name)
	l, err := net.FileListener(f) // a copy
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	unix, ok := l.(*net.UnixListener)
	if !ok || unix.Addr().Network() != network {
		return nil, errors.Join(fmt.Errorf("it is a %s socket, want %s", l.Addr().Network(), network), l.Close())
	}
	return unix, nil
}

// serve answers calls until stop ends, Quit is called, or the guest's end is long enough past.
func serve(stop context.Context, listener net.Listener, s *server) error {
	rpc, err := ttrpc.NewServer()
	if err != nil {
		return fmt.Errorf("make RPC server: %w", err)
	}
	vmmpb.RegisterVMMService(rpc, s)
	served := make(chan error, 1)
	go func() { served <- rpc.Serve(context.WithoutCancel(stop), listener) }()
	s.logger().Info().Msg("serving")

	select {
	case err = <-served:
		err = fmt.Errorf("serve: %w", err)
	case <-stop.Done():
		s.logger().Info().Msg("told to stop by a signal")
	case <-s.quit:
		s.logger().Info().Msg("told to quit")
	case <-s.lingered:
		s.logger().Info().Msg("the guest ended and nobody asked for more")
	}
	s.stopWaiters()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(stop), answerTime)
	defer cancel()
	if serr := rpc.Shutdown(ctx); serr != nil {
		_ = rpc.Close()
	}
	return errors.Join(err, s.close())
}
