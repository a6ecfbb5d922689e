// Torpor-vmm is one virtual machine: a process that boots or restores a guest under KVM and serves the agent's orders
// (api/vmmpb) over ttrpc on a unix socket. It outlives the agent that started it and ends by Quit, by SIGTERM, or a minute
// after its guest has ended.
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
	"syscall"
	"time"

	"github.com/containerd/ttrpc"
	"github.com/rs/zerolog"

	"torpor/api/vmmpb"
)

const (
	// lingerAfterEnd is how long the process stays to answer Wait and Status when its guest has ended.
	lingerAfterEnd = 60 * time.Second
	// answerTime is how long answers under way may take to leave at the end.
	answerTime = 2 * time.Second

	// Small heaps: what is large here is guest memory, which the collector does not see. vCPU threads wait inside system calls,
	// so two processors serve devices and RPC.
	maxProcs  = 2
	gcPercent = 50
	heapLimit = 16 << 20
)

func main() {
	socket := flag.String("socket", "", "unix socket to serve on (required)")
	logPath := flag.String("log", "", "log file, appended to (default standard error)")
	flag.Parse()
	if err := run(*socket, *logPath, flag.Args()); err != nil {
		_, _ = os.Stderr.WriteString("torpor-vmm: " + err.Error() + "\n")
		os.Exit(1)
	}
}

func run(socket, logPath string, rest []string) error {
	if socket == "" || len(rest) > 0 {
		return errors.New("usage: torpor-vmm --socket PATH [--log PATH]")
	}
	runtime.GOMAXPROCS(maxProcs)
	debug.SetGCPercent(gcPercent)
	debug.SetMemoryLimit(heapLimit)

	out := os.Stderr
	if logPath != "" {
		f, err := os.OpenFile(logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			return fmt.Errorf("open log: %w", err)
		}
		defer func() { _ = f.Close() }()
		out = f
	}
	log := zerolog.New(out).With().Timestamp().Int("pid", os.Getpid()).Logger()

	stop, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer cancel()
	signal.Ignore(syscall.SIGPIPE, syscall.SIGHUP) // a peer or the agent going away is not our end

	listener, err := listen(socket)
	if err != nil {
		return err
	}
	return serve(stop, listener, newServer(log), log)
}

// listen makes the socket, for this user alone. What a dead process left in its place is removed.
func listen(path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("remove old socket: %w", err)
	}
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	return l, nil
}

// serve answers calls until stop ends, Quit is called, or the guest's end is long enough past.
func serve(stop context.Context, listener net.Listener, s *server, log zerolog.Logger) error {
	rpc, err := ttrpc.NewServer()
	if err != nil {
		return fmt.Errorf("make RPC server: %w", err)
	}
	vmmpb.RegisterVMMService(rpc, s)
	served := make(chan error, 1)
	go func() { served <- rpc.Serve(context.WithoutCancel(stop), listener) }()
	log.Info().Str("socket", listener.Addr().String()).Msg("serving")

	select {
	case err = <-served:
		err = fmt.Errorf("serve: %w", err)
	case <-stop.Done():
		log.Info().Msg("told to stop by a signal")
	case <-s.quit:
		log.Info().Msg("told to quit")
	case <-s.lingered:
		log.Info().Msg("the guest ended and nobody asked for more")
	}
	s.stopWaiters()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(stop), answerTime)
	defer cancel()
	if serr := rpc.Shutdown(ctx); serr != nil {
		_ = rpc.Close()
	}
	return errors.Join(err, s.close())
}
