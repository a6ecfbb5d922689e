package machine

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"torpor/vmm/kvm"
	"torpor/vmm/legacy"
)

// vcpu is one virtual CPU and the thread it lives on.
//
// Stopping it: set stop, set immediate_exit, send the thread a signal. Whatever the thread was doing, the next thing KVM_RUN
// does is to commit the result of the last exit and return EINTR, with the vCPU's state complete. The signal is SIGURG: the Go
// runtime always has a handler for it and expects strays. None of the three is enough alone: a signal that comes before
// KVM_RUN is entered is caught by immediate_exit, and a vCPU inside KVM_RUN looks at immediate_exit only on entry.
type vcpu struct {
	id  int
	kvm *kvm.VCPU

	calls chan func()
	gone  chan struct{} // closed when the thread has left
	tid   int

	stop    atomic.Bool
	running chan struct{} // closed when the current run has ended; nil before the first

	exits, ioExits, mmioExits atomic.Uint64
}

// newVCPU makes vCPU id with a thread of its own.
func newVCPU(vm *kvm.VM, id int) (*vcpu, error) {
	k, err := vm.CreateVCPU(id)
	if err != nil {
		return nil, fmt.Errorf("create vCPU %d: %w", id, err)
	}
	c := &vcpu{id: id, kvm: k, calls: make(chan func()), gone: make(chan struct{})}
	go c.loop()
	_ = c.do(func() error { c.tid = unix.Gettid(); return nil })
	return c, nil
}

func (c *vcpu) loop() {
	defer close(c.gone)
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	for f := range c.calls {
		f()
	}
}

// do runs f on the vCPU's thread. The vCPU must not be running.
func (c *vcpu) do(f func() error) (err error) {
	done := make(chan struct{})
	c.calls <- func() { err = f(); close(done) }
	<-done
	return err
}

// start lets the vCPU run until halt, or until the guest ends; then ended is called on the vCPU's thread.
func (c *vcpu) start(bus *bus, ended func(End)) {
	c.stop.Store(false)
	c.kvm.SetImmediateExit(false)
	done := make(chan struct{})
	c.running = done
	c.calls <- func() {
		defer close(done)
		if end := c.run(bus); end.Reason != "" {
			ended(end)
		}
	}
}

// halt stops the vCPU outside KVM_RUN and waits for that. A vCPU that does not run is left alone.
func (c *vcpu) halt() {
	if c.running == nil {
		return
	}
	c.kick()
	<-c.running
}

// kick asks the vCPU to stop, without waiting.
func (c *vcpu) kick() {
	c.stop.Store(true)
	c.kvm.SetImmediateExit(true)
	_ = unix.Tgkill(unix.Getpid(), c.tid, unix.SIGURG)
}

// close ends the thread. The vCPU must be halted.
func (c *vcpu) close() {
	close(c.calls)
	<-c.gone
	_ = c.kvm.Close()
}

// maxAgain bounds how often in a row KVM_RUN may say "again" before that is an error. It does so once for every start-up IPI
// a waiting vCPU gets, and spuriously, also as ENOMEM, while the host creates a helper thread.
const maxAgain = 10000

// worthAnother reports whether KVM_RUN may work when it is issued anew, having failed with err for the given time in a row.
func worthAnother(err error, time int) bool {
	return (errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ENOMEM)) && time <= maxAgain
}

// run is the life of a vCPU between start and halt. The result has no Reason if it was halted.
func (c *vcpu) run(bus *bus) End {
	again := 0
	for {
		err := c.kvm.Run()
		switch {
		case err == nil:
			again = 0
		case errors.Is(err, unix.EINTR):
			if c.stop.Load() {
				return End{}
			}
			continue
		case worthAnother(err, again+1):
			again++
			continue
		case errors.Is(err, unix.EFAULT):
			return End{Reason: ReasonMemory, Detail: fmt.Sprintf("vCPU %d: a page of memory cannot be read: %v%s", c.id, err, c.where())}
		default:
			return End{Reason: ReasonError, Detail: fmt.Sprintf("vCPU %d: %v", c.id, err)}
		}
		c.exits.Add(1)
		if end := c.handle(bus); end.Reason != "" {
			return end
		}
	}
}

// handle treats one exit.
func (c *vcpu) handle(bus *bus) End {
	switch reason := c.kvm.Exit(); reason {
	case kvm.ExitIO:
		c.ioExits.Add(1)
		io, ok := c.kvm.IO()
		if !ok {
			return c.failure("malformed port access")
		}
		if !io.Write {
			bus.ports.In(io.Port, io.Size, io.Data)
			return End{}
		}
		switch bus.ports.Out(io.Port, io.Size, io.Data) {
		case legacy.Reset:
			return End{Reason: ReasonReset, Detail: "the guest reset the machine"}
		case legacy.PowerOff:
			return End{Reason: ReasonPowerOff, Detail: "the guest turned the machine off"}
		case legacy.None:
		}
		return End{}
	case kvm.ExitMMIO:
		c.mmioExits.Add(1)
		m, ok := c.kvm.MMIO()
		if !ok {
			return c.failure("malformed memory access")
		}
		bus.mmio(m)
		return End{}
	case kvm.ExitIntr:
		return End{} // a signal came; the next KVM_RUN tells whether it was for us
	case kvm.ExitShutdown:
		return End{Reason: ReasonReset, Detail: "triple fault: the guest reset the machine" + c.where()}
	case kvm.ExitSystemEvent:
		return systemEvent(c.kvm.Suberror())
	default:
		return c.failure(fmt.Sprintf("KVM exit reason %d, sub-code %d", reason, c.kvm.Suberror()))
	}
}

// System event types of KVM_EXIT_SYSTEM_EVENT (linux/kvm.h).
const (
	systemEventShutdown = 1
	systemEventReset    = 2
	systemEventCrash    = 3
)

func systemEvent(kind uint32) End {
	switch kind {
	case systemEventShutdown:
		return End{Reason: ReasonPowerOff, Detail: "system event: shutdown"}
	case systemEventReset:
		return End{Reason: ReasonReset, Detail: "system event: reset"}
	case systemEventCrash:
		return End{Reason: ReasonPanic, Detail: "system event: crash"}
	}
	return End{Reason: ReasonError, Detail: fmt.Sprintf("system event %d", kind)}
}

// failure describes an exit that ends the machine, with where the guest was.
func (c *vcpu) failure(what string) End {
	return End{Reason: ReasonError, Detail: fmt.Sprintf("vCPU %d: %s%s", c.id, what, c.where())}
}

// where tells what the vCPU was at, for people; "" if KVM does not say.
func (c *vcpu) where() string {
	r, err := c.kvm.Regs()
	if err != nil {
		return ""
	}
	s, err := c.kvm.Sregs()
	if err != nil {
		return ""
	}
	return fmt.Sprintf(" (rip %#x, rsp %#x, rflags %#x, cr0 %#x, cr2 %#x, cr3 %#x, cr4 %#x, efer %#x, cs %#x, tr %#x)",
		r.RIP, r.RSP, r.RFlags, s.CR0, s.CR2, s.CR3, s.CR4, s.EFER, s.CS.Selector, s.TR.Selector)
}

// cpuTime is the CPU time the thread has used, in nanoseconds.
func (c *vcpu) cpuTime() (uint64, error) {
	// The clock id of another thread of this process, as pthread_getcpuclockid computes it: ^tid<<3 | per-thread | sched.
	const perThreadSched = 4 | 2
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^c.tid<<3|perThreadSched), &ts); err != nil {
		return 0, os.NewSyscallError("clock_gettime", err)
	}
	return uint64(ts.Nano()), nil
}
