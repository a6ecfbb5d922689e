package main

import (
	"context"
	"errors"
	"net"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"github.com/rs/zerolog"
	"golang.org/x/sys/unix"

	"torpor/api/apierr"
	"torpor/api/fdpass"
	"torpor/api/vmmpb"
	"torpor/vmm/loader"
	"torpor/vmm/machine"
	"torpor/vmm/snapshot"
	"torpor/vmm/virtio"
)

// server translates between the RPC contract and package machine, and holds the one machine of the process.
type server struct {
	host     *machine.Host
	inbox    *fdpass.Inbox
	vsock    *net.UnixListener // nil once a machine got it; guarded by making
	log      zerolog.Logger
	quit     chan struct{} // closed by Quit
	stopping chan struct{} // closed when the process ends: Wait gives up
	lingered chan struct{} // closed when the guest has been gone for lingerAfterEnd
	quitOnce sync.Once

	// mu guards the making of the machine, not its operations.
	mu       sync.Mutex
	machine  *machine.Machine
	prepared *machine.Prepared // for the machine that is to come; nil once that got it
	making   bool
}

// newServer returns a server that owns inbox and vsock.
func newServer(host *machine.Host, inbox *fdpass.Inbox, vsock *net.UnixListener, log zerolog.Logger) *server {
	return &server{host: host, inbox: inbox, vsock: vsock, log: log, quit: make(chan struct{}), stopping: make(chan struct{}), lingered: make(chan struct{})}
}

// stopWaiters lets calls of Wait return.
func (s *server) stopWaiters() { close(s.stopping) }

// close ends the machine, after the last call.
func (s *server) close() error {
	err := s.inbox.Close()
	if s.vsock != nil {
		err = errors.Join(err, s.vsock.Close())
	}
	s.prepared.Close()
	if m := s.current(); m != nil {
		err = errors.Join(err, m.Close())
	}
	return err
}

func (s *server) current() *machine.Machine {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.machine
}

// existing returns the machine or says that there is none.
func (s *server) existing() (*machine.Machine, error) {
	if m := s.current(); m != nil {
		return m, nil
	}
	return nil, apierr.ToStatus(apierr.New(apierr.BadRequest, "there is no machine yet: Boot or Restore comes first"))
}

// create runs f, which makes the process's one machine.
func (s *server) create(f func() (*machine.Machine, error)) error {
	s.mu.Lock()
	busy := s.making || s.machine != nil
	s.making = s.making || !busy
	s.mu.Unlock()
	if busy {
		return apierr.ToStatus(apierr.New(apierr.AlreadyRunning, "this process has its machine already"))
	}
	m, err := f()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.making, s.machine = false, m
	if err != nil {
		s.machine = nil
		return status(err)
	}
	runtime.GOMAXPROCS(processors + m.Waiters())
	go s.linger(m)
	return nil
}

// complete adds to the configuration what is not of the request. A machine that cannot be made takes the vsock socket with it.
// Preconditions: making.
func (s *server) complete(cfg *machine.Config) {
	cfg.Host = s.host
	s.mu.Lock()
	cfg.Prepared, s.prepared = s.prepared, nil
	s.mu.Unlock()
	if cfg.Vsock != nil {
		cfg.Vsock.Listener, s.vsock = s.vsock, nil
	}
}

// linger waits for the guest's end and gives its mourners their time.
func (s *server) linger(m *machine.Machine) {
	settled := time.NewTimer(settleTime)
	defer settled.Stop()
	for ended := false; !ended; {
		select {
		case <-m.Done():
			ended = true
		case <-settled.C:
			debug.FreeOSMemory() // what the making of the machine left: it is not needed again, and there is one for each sandbox
		case <-s.stopping:
			return
		}
	}
	timer := time.NewTimer(lingerAfterEnd)
	defer timer.Stop()
	select {
	case <-timer.C:
		close(s.lingered)
	case <-s.stopping:
	}
}

// Prepare implements vmmpb.VMMService.
func (s *server) Prepare(_ context.Context, r *vmmpb.PrepareRequest) (*vmmpb.PrepareResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.making || s.machine != nil || s.prepared != nil {
		return nil, apierr.ToStatus(apierr.New(apierr.AlreadyRunning, "this process has its machine already, or what is needed for it"))
	}
	var err error
	s.prepared, err = s.host.Prepare(int(r.GetVcpus()))
	return &vmmpb.PrepareResponse{}, status(err)
}

// Boot implements vmmpb.VMMService.
func (s *server) Boot(_ context.Context, r *vmmpb.BootRequest) (*vmmpb.BootResponse, error) {
	err := s.create(func() (*machine.Machine, error) {
		c := claims{from: s.inbox}
		cfg := c.config(r.GetMachine())
		kernel := machine.Kernel{Image: c.file(r.GetKernel()), Initrd: c.optional(r.GetInitrd()), Cmdline: r.GetCmdline()}
		log := c.optional(r.GetMachine().GetClaim().GetLog())
		if err := c.check(); err != nil {
			return nil, err
		}
		if err := s.claimed(r.GetMachine().GetClaim(), log); err != nil {
			c.giveBack()
			return nil, err
		}
		s.complete(&cfg)
		return machine.Boot(cfg, kernel, s.log)
	})
	if err != nil {
		return nil, err
	}
	return &vmmpb.BootResponse{}, nil
}

// Restore implements vmmpb.VMMService.
func (s *server) Restore(_ context.Context, r *vmmpb.RestoreRequest) (*vmmpb.RestoreResponse, error) {
	var phases machine.Phases
	err := s.create(func() (m *machine.Machine, err error) {
		c := claims{from: s.inbox}
		cfg := c.config(r.GetMachine())
		from := machine.Snapshot{State: c.file(r.GetState()), Base: c.file(r.GetBaseMemory()), Layers: c.all(r.GetMemoryLayers())}
		from.WorkingSet, from.Recording = c.optional(r.GetWorkingSet()), r.GetRecording()
		log := c.optional(r.GetMachine().GetClaim().GetLog())
		if err := c.check(); err != nil {
			return nil, err
		}
		if err := s.claimed(r.GetMachine().GetClaim(), log); err != nil {
			c.giveBack()
			return nil, err
		}
		s.complete(&cfg)
		m, phases, err = machine.Restore(cfg, from, r.GetStopped(), s.log)
		return m, err
	})
	if err != nil {
		return nil, err
	}
	s.log.Info().Dur("open", phases.Open).Dur("kvm", phases.KVM).Dur("devices", phases.Devices).Msg("restored")
	return &vmmpb.RestoreResponse{
		PhaseOpenUs:    uint64(phases.Open.Microseconds()),
		PhaseKvmUs:     uint64(phases.KVM.Microseconds()),
		PhaseDevicesUs: uint64(phases.Devices.Microseconds()),
	}, nil
}

// Pause implements vmmpb.VMMService.
func (s *server) Pause(context.Context, *vmmpb.PauseRequest) (*vmmpb.PauseResponse, error) {
	m, err := s.existing()
	if err != nil {
		return nil, err
	}
	return &vmmpb.PauseResponse{}, status(m.Pause())
}

// Resume implements vmmpb.VMMService.
func (s *server) Resume(context.Context, *vmmpb.ResumeRequest) (*vmmpb.ResumeResponse, error) {
	m, err := s.existing()
	if err != nil {
		return nil, err
	}
	return &vmmpb.ResumeResponse{}, status(m.Resume())
}

// Save implements vmmpb.VMMService.
func (s *server) Save(_ context.Context, r *vmmpb.SaveRequest) (*vmmpb.SaveResponse, error) {
	m, err := s.existing()
	if err != nil {
		return nil, err
	}
	kind, err := saveKind(r.GetKind())
	if err != nil {
		return nil, err
	}
	c := claims{from: s.inbox}
	state, memory, tops := c.file(r.GetState()), c.file(r.GetMemory()), c.all(r.GetTops())
	if err := c.check(); err != nil {
		return nil, status(err)
	}
	start := time.Now()
	saved, err := m.Save(machine.SaveOptions{Kind: kind, BytesPerSecond: r.GetBytesPerSecond(), Tops: tops}, state, memory)
	if err != nil {
		return nil, status(err)
	}
	s.log.Info().Dur("took", time.Since(start)).Uint64("data", saved.DataPages).Uint64("zero", saved.ZeroPages).
		Uint64("elided", saved.ElidedPages).Uint64("bytes", saved.MemoryBytes).Msg("saved")
	return saveResponse(saved), nil
}

// Checkpoint implements vmmpb.VMMService.
func (s *server) Checkpoint(ctx context.Context, r *vmmpb.CheckpointRequest) (*vmmpb.CheckpointResponse, error) {
	m, err := s.existing()
	if err != nil {
		return nil, err
	}
	kind, err := saveKind(r.GetKind())
	if err != nil {
		return nil, err
	}
	c := claims{from: s.inbox}
	to := machine.Checkpoint{Kind: kind, State: c.file(r.GetState()), Memory: c.file(r.GetMemory()), Tops: c.all(r.GetTops())}
	to.BytesPerSecond = r.GetBytesPerSecond()
	if err := c.check(); err != nil {
		return nil, status(err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-s.stopping:
			cancel()
		case <-ctx.Done():
		}
	}()
	start := time.Now()
	saved, stopped, err := m.Checkpoint(ctx, to)
	if err != nil {
		return nil, status(err)
	}
	s.log.Info().Dur("took", time.Since(start)).Dur("stopped", stopped).Uint64("data", saved.DataPages).Uint64("zero", saved.ZeroPages).
		Uint64("elided", saved.ElidedPages).Uint64("bytes", saved.MemoryBytes).Msg("checkpointed")
	return &vmmpb.CheckpointResponse{Saved: saveResponse(saved), StoppedUs: uint64(stopped.Microseconds())}, nil
}

// saveKind is what a request wants saved of memory.
func saveKind(k vmmpb.SaveKind) (machine.SaveKind, error) {
	kind, ok := map[vmmpb.SaveKind]machine.SaveKind{
		vmmpb.SaveKind_SAVE_KIND_FULL:       machine.SaveFull,
		vmmpb.SaveKind_SAVE_KIND_DIFF:       machine.SaveDiff,
		vmmpb.SaveKind_SAVE_KIND_CUMULATIVE: machine.SaveCumulative,
	}[k]
	if !ok {
		return 0, apierr.ToStatus(apierr.New(apierr.BadRequest, "kind must be full, diff or cumulative"))
	}
	return kind, nil
}

func saveResponse(saved machine.Saved) *vmmpb.SaveResponse {
	return &vmmpb.SaveResponse{
		StateBytes: saved.StateBytes, MemoryBytes: saved.MemoryBytes,
		PagesData: saved.DataPages, PagesZero: saved.ZeroPages, PagesBase: saved.BasePages, PagesElided: saved.ElidedPages,
		StateSha256: saved.StateSHA256[:], MemoryDigest: saved.Memory[:], MemoryParent: digestOrNone(saved.Parent),
	}
}

func digestOrNone(d snapshot.Digest) []byte {
	if d.IsZero() {
		return nil
	}
	return d[:]
}

// Status implements vmmpb.VMMService.
func (s *server) Status(context.Context, *vmmpb.StatusRequest) (*vmmpb.StatusResponse, error) {
	m := s.current()
	if m == nil {
		return &vmmpb.StatusResponse{State: "idle"}, nil
	}
	st := m.Status()
	return &vmmpb.StatusResponse{
		State: st.State.String(), EndReason: string(st.End.Reason),
		ExitsTotal: st.Exits, ExitsIo: st.IOExits, ExitsMmio: st.MMIOExits,
		ResidentBytes: st.ResidentBytes, VcpuTimeNs: st.CPUTime, Balloon: balloonState(st.Balloon),
	}, nil
}

// Wait implements vmmpb.VMMService.
func (s *server) Wait(ctx context.Context, _ *vmmpb.WaitRequest) (*vmmpb.WaitResponse, error) {
	m, err := s.existing()
	if err != nil {
		return nil, err
	}
	select {
	case <-m.Done():
		end := m.End()
		return &vmmpb.WaitResponse{Reason: string(end.Reason), Detail: end.Detail, ConsoleTail: end.ConsoleTail}, nil
	case <-s.stopping:
		return nil, apierr.ToStatus(apierr.New(apierr.Gone, "the VMM process is ending"))
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Quit implements vmmpb.VMMService.
func (s *server) Quit(context.Context, *vmmpb.QuitRequest) (*vmmpb.QuitResponse, error) {
	s.quitOnce.Do(func() { close(s.quit) })
	return &vmmpb.QuitResponse{}, nil
}

// status gives an error its code.
func status(err error) error {
	if err == nil {
		return nil
	}
	code := apierr.Internal
	var broken *snapshot.Error
	switch {
	case errors.Is(err, machine.ErrConfig), errors.Is(err, loader.ErrKernel), errors.Is(err, fdpass.ErrNotHeld):
		code = apierr.BadRequest
	case errors.Is(err, machine.ErrNotPaused), errors.Is(err, machine.ErrNotRunning), errors.Is(err, machine.ErrNoBalloon):
		code = apierr.BadRequest
	case errors.Is(err, machine.ErrCheckpoint):
		code = apierr.Busy
	case errors.Is(err, virtio.ErrNoStatistics):
		code = apierr.NotReady
	case errors.Is(err, machine.ErrEnded):
		code = apierr.Gone
	case errors.Is(err, machine.ErrCPU):
		code = apierr.Unsupported
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		code = apierr.DiskFull
	case errors.As(err, &broken):
		code = apierr.SandboxBroken
	}
	return apierr.ToStatus(apierr.New(code, "%w", err))
}
