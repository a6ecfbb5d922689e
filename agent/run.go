package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"github.com/containerd/ttrpc"
	"github.com/rs/zerolog"

	"torpor/agent/cell"
	"torpor/agent/disk"
	"torpor/agent/durable"
	"torpor/agent/gateway"
	"torpor/agent/guest"
	"torpor/agent/kept"
	"torpor/agent/pool"
	"torpor/agent/pressure"
	"torpor/agent/rpc"
	"torpor/agent/sandbox"
	"torpor/agent/store"
	"torpor/agent/template"
	"torpor/agent/vmproc"
	"torpor/api/guestpb"
)

// run brings the agent up, serves until ctx ends, and takes it down in the reverse order. VMs live on.
func run(ctx context.Context, cfg config, log zerolog.Logger) (err error) {
	supervisor := &vmproc.Supervisor{Binary: cfg.VMM, RunDir: filepath.Join(cfg.Run, "vm"), KVM: kvmDevice}
	sandboxDir := filepath.Join(cfg.Data, "sandboxes")
	if err := prepare(cfg, supervisor.RunDir, sandboxDir); err != nil {
		return err
	}
	lock, err := lockData(cfg.Data)
	if err != nil {
		return err
	}
	defer lock.Close()
	if supervisor.Cells, err = cell.Open(cfg.Cells); err != nil {
		return err
	}
	gatewaySocket := filepath.Join(cfg.Run, "gateway.sock")
	node, err := about(cfg, gatewaySocket)
	if err != nil {
		return err
	}
	// The sockets are taken before anything is touched: an agent that cannot serve must not take VMs over.
	agentListener, err := listen(filepath.Join(cfg.Run, "agent.sock"))
	if err != nil {
		return err
	}
	defer agentListener.Close()
	gatewayListener, err := listen(gatewaySocket)
	if err != nil {
		return err
	}
	defer gatewayListener.Close()

	// What is stopped below is stopped in order; nothing but the lines of this function decides it.
	lasting := context.WithoutCancel(ctx)
	st, err := store.Open(lasting, filepath.Join(cfg.Data, "agent.db"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, st.Close()) }()
	builder := &template.Builder{VMMs: supervisor, Layers: disk.Layers{}, Budgets: cfg.budgets}
	templates, err := template.Open(lasting, template.Config{
		Dir: filepath.Join(cfg.Data, "templates"), Images: cfg.Images, VMM: cfg.VMM, VCPUs: template.VCPUs(runtime.NumCPU()), Build: builder.Build, Rehearse: builder.Rehearse,
		Store: st, Budgets: cfg.budgets, Log: log,
	})
	if err != nil {
		return err
	}
	defer templates.Close()
	ahead := pool.New(lasting, pool.Config{
		VMMs: supervisor, Size: cfg.Pool, VCPUs: template.VCPUs(runtime.NumCPU()), Budgets: cfg.budgets, Log: log,
	})
	defer ahead.Close()
	shelf, err := kept.Open(filepath.Join(cfg.Data, "snapshots"), durable.OS{})
	if err != nil {
		return err
	}
	sandboxes, err := sandbox.Open(lasting, sandbox.Config{
		Dir: sandboxDir, FS: durable.OS{}, Kept: shelf, Reserve: cfg.ReserveMiB << 20, Store: st, VMMs: machines{supervisor, ahead}, Guests: guestAt,
		Templates: templates, Layers: disk.Layers{}, Budgets: cfg.budgets, Log: log,
		FrozenFor: cfg.FrozenFor, MemoryFloor: cfg.MemoryFloorMiB << 20, Memory: pressure.New(cfg.MemoryFloorMiB << 20),
	})
	if err != nil {
		return err
	}
	defer sandboxes.Close()
	if err := ahead.Fill(); err != nil {
		return err
	}
	templates.Build(sandboxes.Wanted())

	api, err := rpc.NewServer(sandboxes, templates, node)
	if err != nil {
		return err
	}
	proxy := &http.Server{
		Handler:           gateway.New(sandboxes, gateway.Config{DialBudget: cfg.budgets.Dial}, log),
		ReadHeaderTimeout: time.Minute,
	}
	log.Info().Str("node", node.NodeId).Str("version", version).Str("kvm", node.Kvm).Bool("emulated", node.Emulated).Msg("serving")
	return serve(ctx, api, agentListener, proxy, gatewayListener, sandboxes, cfg.budgets.Stop)
}

// prepare checks the host and makes the directories.
func prepare(cfg config, dirs ...string) error {
	if err := checkKVM(kvmDevice); err != nil {
		return err
	}
	if err := cell.Check(); err != nil {
		return err
	}
	if _, err := os.Stat(cfg.VMM); err != nil {
		return fmt.Errorf("the VMM program is missing (%w): build it with `make build` or name it with --vmm", err)
	}
	if _, err := os.Stat(cfg.Images); err != nil {
		return fmt.Errorf("the images are missing (%w): build them with `torpor-images` or name them with --images", err)
	}
	for _, dir := range append(dirs, cfg.Data, cfg.Run) {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("make the directory: %w", err)
		}
	}
	return checkRoom(cfg.Data, cfg.ReserveMiB)
}

// serve serves until ctx ends or one of the two servers fails, and returns when both have ended.
func serve(ctx context.Context, api *ttrpc.Server, apiListener net.Listener, proxy *http.Server, proxyListener net.Listener,
	sandboxes *sandbox.Manager, grace time.Duration,
) error {
	failed := make(chan error, 2)
	var servers sync.WaitGroup
	servers.Go(func() {
		if err := api.Serve(context.WithoutCancel(ctx), apiListener); err != nil && !errors.Is(err, ttrpc.ErrServerClosed) {
			failed <- fmt.Errorf("serve the agent's socket: %w", err)
		}
	})
	servers.Go(func() {
		if err := proxy.Serve(proxyListener); err != nil && !errors.Is(err, http.ErrServerClosed) {
			failed <- fmt.Errorf("serve the data plane: %w", err)
		}
	})
	var failure error
	select {
	case <-ctx.Done():
	case failure = <-failed:
	}

	// Leases end first, so that no stream holds the servers up; then whoever still waits gets an answer.
	sandboxes.Close()
	stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), grace)
	defer cancel()
	if proxy.Shutdown(stopping) != nil {
		proxy.Close()
	}
	if api.Shutdown(stopping) != nil {
		api.Close()
	}
	servers.Wait()
	return failure
}

// machines gives the state machine its VMMs as the interface it wants.
type machines struct {
	*vmproc.Supervisor
	ahead *pool.Pool
}

func (m machines) Start(ctx context.Context, name, logPath string) (sandbox.VM, error) {
	p, err := m.ahead.Start(ctx, name, logPath)
	if err != nil {
		return nil, err // not p: a nil *Process would be an interface that is not nil
	}
	return p, nil
}

func (m machines) Adopt(ctx context.Context, name string, id vmproc.Identity) (sandbox.VM, error) {
	p, err := m.Supervisor.Adopt(ctx, name, id)
	if err != nil {
		return nil, err
	}
	return p, nil
}

// envd gives the state machine a guest as the interface it wants.
type envd struct{ *guest.Guest }

func guestAt(vsockSocket string) sandbox.Guest { return envd{guest.At(vsockSocket)} }

func (g envd) Handshake(ctx context.Context, req *guestpb.HandshakeRequest) (sandbox.Contact, error) {
	c, err := g.Guest.Handshake(ctx, req)
	if err != nil {
		return nil, err
	}
	return c, nil
}

func (g envd) ListenHello() (sandbox.Hello, error) {
	h, err := g.Guest.ListenHello()
	if err != nil {
		return nil, err
	}
	return h, nil
}
