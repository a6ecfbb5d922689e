// Package pool keeps VMM processes that were started, jailed and made ready before anybody needs one: what a start then has to
// wait for is the machine alone. One that is taken is replaced a moment later, when the start it was taken for is over; who comes
// while there is none starts a process of his own, as without a pool.
package pool

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"torpor/agent/timing"
	"torpor/agent/vmproc"
)

// Config is what a Pool works with. Every field is needed.
type Config struct {
	VMMs    *vmproc.Supervisor
	Size    int    // processes; 0: none
	VCPUs   uint32 // of the machines most wanted
	Budgets timing.Budgets
	Log     zerolog.Logger
}

// Pool hands out VMM processes. It is safe for concurrent use.
type Pool struct {
	cfg    Config
	ctx    context.Context
	cancel context.CancelFunc
	work   sync.WaitGroup
	taken  chan struct{} // one is missing; of capacity 1

	mu   sync.Mutex
	idle []*vmproc.Process // oldest first; guarded by mu
}

// New returns an empty pool. Close it.
func New(ctx context.Context, cfg Config) *Pool {
	p := &Pool{cfg: cfg, taken: make(chan struct{}, 1)}
	p.ctx, p.cancel = context.WithCancel(ctx)
	return p
}

// Fill removes what the pool of an agent that was killed has left, whose processes must have ended, and begins to fill this one, in the
// background. Once.
func (p *Pool) Fill() error {
	if err := p.cfg.VMMs.SweepAhead(); err != nil {
		return err
	}
	p.work.Go(p.run)
	return nil
}

// Close ends the processes that nobody took.
func (p *Pool) Close() {
	p.cancel()
	p.work.Wait()
	for vm := p.take(); vm != nil; vm = p.take() {
		p.discard(vm)
	}
}

// Start returns a VMM for the machine called name: one of the pool, or a new one.
func (p *Pool) Start(ctx context.Context, name, logPath string) (*vmproc.Process, error) {
	for vm := p.take(); vm != nil; vm = p.take() {
		err := errors.New("it ended while nobody used it")
		select {
		case <-vm.Done():
		default:
			err = p.cfg.VMMs.Claim(vm, name, logPath)
		}
		if err == nil {
			return vm, nil
		}
		p.cfg.Log.Warn().Err(err).Int("pid", vm.Identity().PID).Msg("a VMM of the pool is not used")
		p.work.Go(func() { p.discard(vm) })
	}
	return p.cfg.VMMs.Start(ctx, name, logPath)
}

// take takes the oldest out, nil if there is none.
func (p *Pool) take() *vmproc.Process {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.idle) == 0 {
		return nil
	}
	vm := p.idle[0]
	p.idle = p.idle[1:]
	select {
	case p.taken <- struct{}{}:
	default:
	}
	return vm
}

func (p *Pool) discard(vm *vmproc.Process) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(p.ctx), p.cfg.Budgets.Kill)
	defer cancel()
	if err := p.cfg.VMMs.Discard(ctx, vm); err != nil {
		p.cfg.Log.Warn().Err(err).Int("pid", vm.Identity().PID).Msg("end a VMM of the pool")
	}
}

// run keeps the pool full until Close.
func (p *Pool) run() {
	pause := p.cfg.Budgets.RetryMin
	for p.ctx.Err() == nil {
		err := p.refill()
		if err == nil {
			pause = p.cfg.Budgets.RetryMin
			select {
			case <-p.taken:
			case <-p.ctx.Done():
				return
			}
			p.wait(p.cfg.Budgets.PoolRefill)
			continue
		}
		if p.ctx.Err() == nil {
			p.cfg.Log.Warn().Err(err).Msg("start a VMM ahead")
		}
		p.wait(pause)
		pause = min(2*pause, p.cfg.Budgets.RetryMax)
	}
}

func (p *Pool) wait(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-p.ctx.Done():
	}
}

// refill starts what is missing.
func (p *Pool) refill() error {
	for p.Ready() < p.cfg.Size {
		ctx, cancel := context.WithTimeout(p.ctx, p.cfg.Budgets.VMMStart)
		vm, err := p.cfg.VMMs.StartAhead(ctx, p.cfg.VCPUs)
		cancel()
		if err != nil {
			return err
		}
		p.mu.Lock()
		p.idle = append(p.idle, vm)
		p.mu.Unlock()
	}
	return nil
}

// Ready is how many processes wait to be taken.
func (p *Pool) Ready() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.idle)
}
