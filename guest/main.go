// Command envd is the guest of a sandbox: as PID 1 it boots the guest and supervises; as the supervised daemon it serves
// the data plane and the host. Run by hand with -listen it serves the data plane alone (developer mode).
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"torpor/guest/control"
	"torpor/guest/dataplane"
	"torpor/guest/env"
	"torpor/guest/pid1"
	"torpor/guest/process"
)

const (
	identityFile = "/run/torpor/identity.json"
	helloTimeout = 30 * time.Second
)

// options are the command line.
type options struct {
	guest, hello        bool
	listen, token, user string
	version             bool
}

func main() {
	log := zerolog.New(os.Stderr).With().Timestamp().Logger()
	if os.Getpid() == 1 {
		first := &pid1.PID1{Path: env.DefaultPath, Args: []string{"-guest"}, Hello: "-hello", Log: log.With().Str("by", "pid1").Logger()}
		log.Fatal().Err(first.Run(os.Args)).Msg("the guest cannot run")
	}
	var o options
	flag.BoolVar(&o.guest, "guest", false, "serve a guest: data plane and host control over vsock (set by PID 1)")
	flag.BoolVar(&o.hello, "hello", false, "with -guest: tell the host when everything listens")
	flag.StringVar(&o.listen, "listen", "", "developer mode: serve only the data plane, on `tcp:HOST:PORT` or unix:PATH")
	flag.StringVar(&o.token, "token", "", "developer mode: the access token; empty: requests are not checked")
	flag.StringVar(&o.user, "user", "root", "developer mode: the default user")
	flag.BoolVar(&o.version, "version", false, "print the envd version")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := run(ctx, o, log); err != nil {
		log.Error().Err(err).Msg("envd ends")
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context, o options, log zerolog.Logger) error {
	switch {
	case o.version:
		_, err := fmt.Fprintln(os.Stdout, env.Version)
		return err
	case o.guest:
		return serveGuest(ctx, o.hello, log)
	case o.listen != "":
		return serveDeveloper(ctx, o, log)
	}
	return errors.New("nothing to do: envd runs as PID 1 of a guest, or in developer mode with -listen")
}

// serveGuest is the daemon of a guest.
func serveGuest(ctx context.Context, hello bool, log zerolog.Logger) error {
	unix.Umask(0o022)
	if err := os.WriteFile("/proc/self/comm", []byte("envd"), 0); err != nil {
		log.Warn().Err(err).Msg("naming the process") // it was started as /proc/self/exe
	}
	store, err := env.NewStore(identityFile, env.Identity{DefaultUser: control.DefaultUser}, env.SystemUsers{})
	if err != nil {
		return err
	}
	processes, err := process.New(process.Config{Store: store, Log: log, Shield: true})
	if err != nil {
		return err
	}
	system := control.Guest{Markers: "/run/e2b", MachineID: "/etc/machine-id", Init: 1}
	plane := dataplane.New(dataplane.Config{Store: store, Process: processes, Log: log, Clock: system.SetClock})

	listeners := map[uint32]net.Listener{}
	for _, port := range []uint32{control.PortDataPlane, control.PortForward, control.PortControl} {
		if listeners[port], err = control.Listen(port, log); err != nil {
			return err
		}
	}
	planes := []net.Listener{listeners[control.PortDataPlane]}
	if inside, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", control.PortDataPlane)); err == nil {
		planes = append(planes, inside)
	} else { // a program of the sandbox took the port
		log.Warn().Err(err).Msg("the data plane is not reachable from inside the guest")
	}
	g, ctx := errgroup.WithContext(ctx)
	serveHTTP(ctx, g, plane, planes, log)
	g.Go(func() error { return control.Forwarder{Log: log}.Serve(ctx, listeners[control.PortForward]) })
	g.Go(func() error { return control.New(store, system, log).Serve(ctx, listeners[control.PortControl]) })
	if hello {
		g.Go(func() error {
			ctx, cancel := context.WithTimeout(ctx, helloTimeout)
			defer cancel()
			if err := control.Hello(ctx); err != nil {
				log.Warn().Err(err).Msg("saying hello")
			}
			return nil // a host that is not interested is no reason not to serve
		})
	}
	return g.Wait()
}

// serveDeveloper serves the data plane on this machine, without a guest around it.
func serveDeveloper(ctx context.Context, o options, log zerolog.Logger) error {
	network, address, ok := strings.Cut(o.listen, ":")
	if !ok || (network != "tcp" && network != "unix") {
		return fmt.Errorf("-listen %q: use tcp:HOST:PORT or unix:PATH", o.listen)
	}
	store, err := env.NewStore("", env.Identity{AccessToken: o.token, DefaultUser: o.user}, env.SystemUsers{})
	if err != nil {
		return err
	}
	processes, err := process.New(process.Config{Store: store, Log: log, KeepUser: os.Geteuid() != 0})
	if err != nil {
		return err
	}
	l, err := net.Listen(network, address)
	if err != nil {
		return fmt.Errorf("listening: %w", err)
	}
	log.Info().Stringer("address", l.Addr()).Msg("serving the data plane in developer mode")
	g, ctx := errgroup.WithContext(ctx)
	serveHTTP(ctx, g, dataplane.New(dataplane.Config{Store: store, Process: processes, Log: log}), []net.Listener{l}, log)
	return g.Wait()
}

// serveHTTP serves a data plane on all listeners until ctx ends; then open streams are broken, not ended, so that their
// clients can tell.
func serveHTTP(ctx context.Context, g *errgroup.Group, plane http.Handler, listeners []net.Listener, log zerolog.Logger) {
	server := dataplane.NewServer(plane, log)
	for _, l := range listeners {
		g.Go(func() error {
			if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
				return fmt.Errorf("serving the data plane: %w", err)
			}
			return nil
		})
	}
	g.Go(func() error {
		<-ctx.Done()
		return server.Close()
	})
}
