// Package process serves process.Process: processes and terminals that outlive the requests that started them.
//
// Wire rules are those of E2B's envd: the first event of a stream is start, then data as it comes, then end; a Start's
// Connect-Timeout-Ms kills the process, a lost connection does not.
package process

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"github.com/rs/zerolog"

	"torpor/api/envd"
	"torpor/guest/env"
)

// exitKept is how long the end of a process can still be asked for by Connect.
const exitKept = 30 * time.Second

// Config is what a Service needs. Store and Log are required.
type Config struct {
	Store *env.Store
	Log   zerolog.Logger
	// Shield keeps the daemon from being killed for lack of memory; its processes can be. It needs CAP_SYS_RESOURCE.
	Shield bool
	// KeepUser starts processes as the daemon's own user, for a daemon that may not change it.
	KeepUser bool
}

// Service implements envdconnect.ProcessHandler.
type Service struct {
	store  *env.Store
	log    zerolog.Logger
	shield *shield
	setuid bool

	mu      sync.Mutex
	running map[int]*proc
	ended   map[int]*proc // reaped; kept for exitKept after the end event
}

// New returns a Service without processes.
func New(c Config) (*Service, error) {
	s := &Service{
		store: c.Store, log: c.Log, setuid: !c.KeepUser,
		running: map[int]*proc{}, ended: map[int]*proc{},
	}
	if c.Shield {
		var err error
		if s.shield, err = newShield(-1000, 0); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// List answers the processes that run.
func (s *Service) List(context.Context, *connect.Request[envd.ListRequest]) (*connect.Response[envd.ListResponse], error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	resp := &envd.ListResponse{}
	for _, pid := range slices.Sorted(maps.Keys(s.running)) {
		resp.Processes = append(resp.Processes, s.running[pid].info())
	}
	return connect.NewResponse(resp), nil
}

// Start starts a process and streams its events.
func (s *Service) Start(ctx context.Context, req *connect.Request[envd.StartRequest], stream *connect.ServerStream[envd.StartResponse]) error {
	p, err := s.launch(req.Header(), req.Msg)
	if err != nil {
		return startError(err)
	}
	sub := p.hub.subscribe()
	defer sub.leave()
	go s.see(ctx, p)
	err = relay(ctx, p, sub, interval(req.Header()), func(ev *envd.ProcessEvent) error {
		if ev.GetEnd() != nil && p.expired.Load() {
			return errExpired
		}
		return stream.Send(&envd.StartResponse{Event: ev})
	})
	return streamError(err)
}

// launch applies the rules of a request and starts its process.
func (s *Service) launch(h http.Header, msg *envd.StartRequest) (*proc, error) {
	u, err := s.store.User(env.RequestUser(h))
	if err != nil {
		return nil, err
	}
	dir, err := s.workdir(u, msg.GetProcess().GetCwd())
	if err != nil {
		return nil, err
	}
	environ, err := list(s.store.Environ(u, msg.GetProcess().GetEnvs()))
	if err != nil {
		return nil, err
	}
	p, err := s.start(spec{request: msg, user: u, dir: dir, environ: environ})
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	s.running[p.pid] = p
	delete(s.ended, p.pid) // an older process of the same number
	s.mu.Unlock()
	return p, nil
}

// see follows a process to its end, which is set by its own exit or by the deadline of the request that started it, but
// not by that request's end.
func (s *Service) see(request context.Context, p *proc) {
	if deadline, ok := request.Deadline(); ok {
		defer p.killAfter(time.Until(deadline)).Stop()
	}
	p.run(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.running, p.pid)
		s.ended[p.pid] = p
	})
	time.AfterFunc(exitKept, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.ended[p.pid] == p {
			delete(s.ended, p.pid)
		}
	})
}

// Connect streams the events of a process from now on.
func (s *Service) Connect(ctx context.Context, req *connect.Request[envd.ConnectRequest], stream *connect.ServerStream[envd.ConnectResponse]) error {
	p, err := s.find(req.Msg.GetProcess(), true)
	if err != nil {
		return err
	}
	sub := p.hub.subscribe()
	defer sub.leave()
	return streamError(relay(ctx, p, sub, interval(req.Header()), func(ev *envd.ProcessEvent) error {
		return stream.Send(&envd.ConnectResponse{Event: ev})
	}))
}

// Update resizes the terminal of a process, if the request holds a size.
func (s *Service) Update(_ context.Context, req *connect.Request[envd.UpdateRequest]) (*connect.Response[envd.UpdateResponse], error) {
	p, err := s.find(req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	if size := req.Msg.GetPty().GetSize(); size != nil {
		if err := p.resize(size); err != nil {
			return nil, connect.NewError(connect.CodeInternal, err)
		}
	}
	return connect.NewResponse(&envd.UpdateResponse{}), nil
}

// SendInput writes to the stdin or the terminal of a process.
func (s *Service) SendInput(ctx context.Context, req *connect.Request[envd.SendInputRequest]) (*connect.Response[envd.SendInputResponse], error) {
	p, err := s.find(req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	if err := p.feed(ctx, req.Msg.GetInput()); err != nil {
		return nil, inputError(err)
	}
	return connect.NewResponse(&envd.SendInputResponse{}), nil
}

// StreamInput writes a stream of inputs, in order.
func (s *Service) StreamInput(ctx context.Context, stream *connect.ClientStream[envd.StreamInputRequest]) (*connect.Response[envd.StreamInputResponse], error) {
	var p *proc
	for stream.Receive() {
		switch ev := stream.Msg().GetEvent().(type) {
		case *envd.StreamInputRequest_Start:
			found, err := s.find(ev.Start.GetProcess(), false)
			if err != nil {
				return nil, err
			}
			p = found
		case *envd.StreamInputRequest_Data:
			if p == nil {
				return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("the first event of an input stream must be start"))
			}
			if err := p.feed(ctx, ev.Data.GetInput()); err != nil {
				return nil, inputError(err)
			}
		}
	}
	if err := stream.Err(); err != nil {
		return nil, err
	}
	return connect.NewResponse(&envd.StreamInputResponse{}), nil
}

// SendSignal sends SIGKILL or SIGTERM to a process, not to its children.
func (s *Service) SendSignal(_ context.Context, req *connect.Request[envd.SendSignalRequest]) (*connect.Response[envd.SendSignalResponse], error) {
	p, err := s.find(req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	var sig syscall.Signal
	switch req.Msg.GetSignal() {
	case envd.Signal_SIGNAL_SIGKILL:
		sig = syscall.SIGKILL
	case envd.Signal_SIGNAL_SIGTERM:
		sig = syscall.SIGTERM
	default:
		return nil, connect.NewError(connect.CodeUnimplemented, fmt.Errorf("signal %s is not supported", req.Msg.GetSignal()))
	}
	switch err := p.signal(sig); {
	case errors.Is(err, os.ErrProcessDone):
		return nil, notFound(req.Msg.GetProcess())
	case err != nil:
		return nil, connect.NewError(connect.CodeInternal, err)
	}
	return connect.NewResponse(&envd.SendSignalResponse{}), nil
}

// CloseStdin closes the stdin pipe of a process.
func (s *Service) CloseStdin(_ context.Context, req *connect.Request[envd.CloseStdinRequest]) (*connect.Response[envd.CloseStdinResponse], error) {
	p, err := s.find(req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	switch {
	case p.tty:
		return nil, connect.NewError(connect.CodeUnknown, errors.New("the stdin of a terminal cannot be closed; send Ctrl+D (0x04) instead"))
	case p.in == nil:
		return nil, connect.NewError(connect.CodeInternal, errInputClosed)
	}
	p.in.close()
	return connect.NewResponse(&envd.CloseStdinResponse{}), nil
}

// find returns the selected process: a running one, or (if late) also one whose end is still kept.
func (s *Service) find(sel *envd.ProcessSelector, late bool) (*proc, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	pools := []map[int]*proc{s.running}
	if late {
		pools = append(pools, s.ended)
	}
	for _, pool := range pools {
		switch by := sel.GetSelector().(type) {
		case *envd.ProcessSelector_Pid:
			if p := pool[int(by.Pid)]; p != nil {
				return p, nil
			}
		case *envd.ProcessSelector_Tag:
			for _, p := range pool {
				if p.tag != nil && *p.tag == by.Tag {
					return p, nil
				}
			}
		default:
			return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("no process selected: give a pid or a tag"))
		}
	}
	return nil, notFound(sel)
}

func notFound(sel *envd.ProcessSelector) error {
	if by, ok := sel.GetSelector().(*envd.ProcessSelector_Tag); ok {
		return connect.NewError(connect.CodeNotFound, fmt.Errorf("process with tag %s not found", by.Tag))
	}
	return connect.NewError(connect.CodeNotFound, fmt.Errorf("process with pid %d not found", sel.GetPid()))
}

// feed writes one input; its kind must fit the process.
func (p *proc) feed(ctx context.Context, in *envd.ProcessInput) error {
	switch data := in.GetInput().(type) {
	case *envd.ProcessInput_Stdin:
		if p.tty {
			return errors.New("process has a terminal: send pty input, not stdin")
		}
		return p.in.write(ctx, data.Stdin)
	case *envd.ProcessInput_Pty:
		if !p.tty {
			return errNoTerminal
		}
		return p.in.write(ctx, data.Pty)
	}
	return &StartError{Reason: "no input given: set stdin or pty"}
}
