package machine

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/rs/zerolog"
	"golang.org/x/sys/unix"

	"torpor/vmm/cow"
	"torpor/vmm/kvm"
	"torpor/vmm/legacy"
	"torpor/vmm/ratelimit"
	"torpor/vmm/snapshot"
	"torpor/vmm/virtio"
	"torpor/vmm/x86"
)

// State of a machine.
type State int32

// The states; see the package comment for the moves.
const (
	Paused State = iota
	Running
	Ended
)

func (s State) String() string { return [...]string{"paused", "running", "ended"}[s] }

// Errors callers branch on.
var (
	ErrEnded      = errors.New("the guest has ended")
	ErrNotPaused  = errors.New("the machine is not paused")
	ErrNotRunning = errors.New("the machine is not running")
	ErrCheckpoint = errors.New("the machine is being checkpointed")
)

// Machine is one virtual machine.
type Machine struct {
	log   zerolog.Logger
	shape snapshot.Shape
	cpu   x86.Template

	host    *Host // borrowed
	vm      *kvm.VM
	ram     *ram
	vcpus   []*vcpu
	bus     bus
	disks   []*cow.Chain
	vsock   *virtio.Vsock // nil: none
	nets    []*virtio.Net
	balloon *virtio.Balloon // nil: none
	console *legacy.Log     // nil: none

	endings    chan End // from vCPU threads
	closing    chan struct{}
	supervised chan struct{}
	done       chan struct{}
	end        End // valid when done is closed

	state atomic.Int32 // a State; written under mu, read anywhere

	checkpointing sync.Mutex // one at a time; taken before mu

	// mu serialises the operations.
	mu       sync.Mutex
	clock    uint64   // kvmclock at the pause, ns; valid while paused
	baseSums []uint32 // checksums of the base memory; nil without one
	recorder recorder // of the working set
}

// assemble builds the machine around its memory, everything but vCPU and device state. It takes ram over, whatever happens, and
// of the configuration the files it got to.
func assemble(cfg Config, mem *ram, log zerolog.Logger) (_ *Machine, err error) {
	var u undo
	defer func() {
		if err != nil {
			u.run()
		}
	}()
	u.add(mem.close)
	m := &Machine{
		log: log, host: cfg.Host, ram: mem,
		endings: make(chan End, x86.MaxVCPUs), closing: make(chan struct{}), supervised: make(chan struct{}), done: make(chan struct{}),
	}
	if m.cpu, err = x86.FindTemplate(cfg.CPUTemplate); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	made := cfg.Prepared.take(cfg.VCPUs)
	if made == nil {
		cfg.Prepared.Close()
		if made, err = m.host.Prepare(cfg.VCPUs); err != nil {
			return nil, err
		}
	}
	u.add(made.Close)
	m.vm, m.vcpus = made.vm, made.vcpus
	if err := m.mapMemory(); err != nil {
		return nil, err
	}
	if err := m.wire(cfg, &u); err != nil {
		return nil, err
	}
	for _, c := range m.vcpus {
		c.kvm.SetWords(m.bus.words())
	}
	m.shape = cfg.shape(m.disks)
	go m.supervise()
	return m, nil
}

// mapMemory gives the guest its memory.
func (m *Machine) mapMemory() error {
	for i, r := range m.ram.mem.Regions() {
		if err := m.vm.SetMemoryRegion(uint32(i), uint64(r.GPA), r.Bytes); err != nil {
			return fmt.Errorf("set up %d bytes of memory at %#x: %w", len(r.Bytes), uint64(r.GPA), err)
		}
	}
	return nil
}

// wire makes the devices: disks, vsock, rng, network cards, balloon in the virtio slots, and the ports.
func (m *Machine) wire(cfg Config, u *undo) (err error) {
	m.bus.ports = &legacy.Ports{SleepPort: x86.SleepCtlPort, SleepType: sleepTypeOff}
	if cfg.Console != nil {
		if err := m.wireConsole(*cfg.Console, u); err != nil {
			return err
		}
	}
	for _, d := range cfg.Disks {
		chain, err := cow.OpenFiles(d.files())
		if err != nil {
			return fmt.Errorf("open disk %s: %w", d.ID, err)
		}
		u.add(func() { _ = chain.Close() })
		m.disks = append(m.disks, chain)
		limit, err := ratelimit.New(d.Limit, ratelimit.System())
		if err != nil {
			return fmt.Errorf("limit disk %s: %w", d.ID, err)
		}
		if err := m.addSlot(virtio.NewBlock(chain, d.ID, d.Top == nil, limit), u); err != nil {
			return err
		}
	}
	if cfg.Vsock != nil {
		if m.vsock, err = virtio.NewVsock(cfg.Vsock.CID, cfg.Vsock.Listener); err != nil {
			return fmt.Errorf("open vsock: %w", err)
		}
		u.add(func() { _ = m.vsock.Close() })
		if err := m.addSlot(m.vsock, u); err != nil {
			return err
		}
	}
	if err := m.addSlot(virtio.NewRNG(), u); err != nil {
		return err
	}
	for _, n := range cfg.Net {
		if err := m.wireNet(n, u); err != nil {
			return err
		}
	}
	return m.wireBalloon(cfg.Balloon, u)
}

func (m *Machine) wireConsole(c Console, u *undo) (err error) {
	if m.console, err = legacy.NewLog(c.Log, c.MaxBytes); err != nil {
		return err
	}
	u.add(func() { _ = m.console.Close() })
	irq := &irqLine{vm: m.vm, gsi: x86.UARTGSI}
	m.bus.ports.Serial = legacy.NewSerial(m.console, irq.signal)
	return nil
}

// Waiters is how many threads wait inside system calls, for notifications of the guest, and keep their right to run Go code
// meanwhile. vCPUs do not (vmm/kvm).
func (m *Machine) Waiters() (n int) {
	for _, s := range m.bus.slots {
		n += s.threads()
	}
	return n
}

// Close ends the machine and frees everything but the Host. Disks are flushed first; the error is about that alone.
func (m *Machine) Close() error {
	close(m.closing)
	<-m.supervised
	m.checkpointing.Lock() // one that is under way ends
	defer m.checkpointing.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.haltLocked()
	for _, c := range m.vcpus {
		c.close()
	}
	for _, s := range m.bus.slots {
		s.close()
	}
	err := m.flushLocked()
	if m.vsock != nil {
		_ = m.vsock.Close()
	}
	for _, n := range m.nets {
		_ = n.Close()
	}
	for _, d := range m.disks {
		_ = d.Close()
	}
	if m.console != nil {
		_ = m.console.Close()
	}
	_ = m.vm.Close()
	m.ram.close()
	return err
}

// Pause stops the vCPUs outside KVM_RUN and drains the devices. A paused machine stays as it is.
func (m *Machine) Pause() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch State(m.state.Load()) {
	case Ended:
		return ErrEnded
	case Paused:
		return nil
	case Running:
	}
	m.haltLocked()
	err := m.quiesceLocked()
	if err != nil {
		m.runLocked()
		return err
	}
	m.state.Store(int32(Paused))
	return nil
}

// quiesceLocked stops the devices and takes the time. On error devices may be paused; runLocked undoes that.
func (m *Machine) quiesceLocked() error {
	c, err := m.vm.Clock()
	if err != nil {
		return fmt.Errorf("pause: %w", err)
	}
	m.clock = c.Clock
	for _, s := range m.bus.slots {
		if err := s.transport.Pause(); err != nil {
			return fmt.Errorf("pause %s: %w", s.name, err)
		}
	}
	if m.console != nil {
		m.console.Flush()
	}
	return nil
}

// Resume lets a paused machine run on. Its monotonic clock continues from the pause. A running machine stays as it is.
func (m *Machine) Resume() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch State(m.state.Load()) {
	case Ended:
		return ErrEnded
	case Running:
		return nil
	case Paused:
	}
	if err := m.vm.SetClock(m.clock); err != nil {
		return fmt.Errorf("resume: %w", err)
	}
	m.runLocked()
	return nil
}

// runLocked resumes the devices and starts the vCPUs. Preconditions: the vCPUs are halted.
func (m *Machine) runLocked() {
	for _, c := range m.vcpus {
		// EINVAL: the guest has not set up its kvmclock (yet), so it cannot misjudge the pause either.
		if err := c.do(c.kvm.KVMClockCtrl); err != nil && !errors.Is(err, unix.EINVAL) {
			m.log.Warn().Err(err).Int("vcpu", c.id).Msg("tell the guest about the pause")
		}
	}
	for _, s := range m.bus.slots {
		// A device that cannot go on fails its own requests; the guest is better off running.
		if err := s.transport.Resume(); err != nil {
			m.log.Error().Err(err).Str("device", s.name).Msg("resume device")
		}
	}
	if m.bus.ports.Serial != nil {
		m.bus.ports.Serial.Resume()
	}
	m.state.Store(int32(Running))
	for _, c := range m.vcpus {
		c.start(&m.bus, func(end End) { m.endings <- end })
	}
}

// haltLocked stops all vCPUs.
func (m *Machine) haltLocked() {
	for _, c := range m.vcpus {
		if c.running != nil {
			c.kick()
		}
	}
	for _, c := range m.vcpus {
		c.halt()
	}
}

// flushLocked makes the disks durable.
func (m *Machine) flushLocked() error {
	var errs []error
	for i, d := range m.disks {
		if d.ReadOnly() {
			continue
		}
		if err := d.Flush(); err != nil {
			errs = append(errs, fmt.Errorf("flush disk %s: %w", m.shape.Disks[i].ID, err))
		}
	}
	return errors.Join(errs...)
}

// Status is what can be told at any moment.
type Status struct {
	State                     State
	End                       End // of an ended guest
	Exits, IOExits, MMIOExits uint64
	ResidentBytes             uint64                // of this process; all but a few MiB is guest memory
	CPUTime                   uint64                // of the vCPU threads, ns
	Balloon                   *virtio.BalloonStatus // nil: none
	Nets                      []virtio.NetStats
}

// Status never waits for the guest.
func (m *Machine) Status() Status {
	s := Status{State: State(m.state.Load()), ResidentBytes: m.host.residentBytes()}
	if s.State == Ended {
		<-m.done
		s.End = m.end
	}
	if m.balloon != nil {
		b := m.balloon.Status()
		s.Balloon = &b
	}
	for _, c := range m.vcpus {
		s.Exits += c.exits.Load() + c.kvm.Answered()
		s.IOExits += c.ioExits.Load()
		s.MMIOExits += c.mmioExits.Load() + c.kvm.Answered()
		if t, err := c.cpuTime(); err == nil {
			s.CPUTime += t
		}
	}
	for _, n := range m.nets {
		s.Nets = append(s.Nets, n.Stats())
	}
	return s
}
