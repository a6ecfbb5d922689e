package machine

import (
	"bytes"

	"torpor/vmm/guestmem"
)

// Reason is why a guest ended.
type Reason string

// The reasons.
const (
	ReasonReset    Reason = "reset"    // it rebooted; the machine does not
	ReasonPowerOff Reason = "poweroff" // ACPI S5
	ReasonPanic    Reason = "panic"    // its kernel panicked and then reset
	ReasonMemory   Reason = "memory"   // a page of its RAM cannot be read, or is not what was saved: a file under it was cut short or damaged, or its disk failed
	ReasonError    Reason = "error"    // KVM could not run it on
)

// End says how a guest ended. The zero value means that it has not.
type End struct {
	Reason      Reason
	Detail      string
	ConsoleTail []byte // the newest output, at most 4 KiB; nil without a console
}

// consoleTailBytes is the length of End.ConsoleTail.
const consoleTailBytes = 4 << 10

// bootFlag is the word in the BIOS data area by which a PC kernel that resets tells the firmware how: warmBoot for a warm boot,
// 0 for a cold one. With reboot=panic_warm on its command line Linux asks for a warm boot after a panic and only then (its
// kernel/panic.c and arch/x86/kernel/reboot.c), so a panic is known even without a console.
const (
	bootFlag = guestmem.Addr(0x472)
	warmBoot = 0x1234
)

// supervise waits for a vCPU to report the guest's end, or for memory to be found damaged, then stops the rest. It ends with the
// machine.
func (m *Machine) supervise() {
	defer close(m.supervised)
	select {
	case end := <-m.endings:
		m.finish(end)
	case <-m.ram.verifier.failed():
		m.finish(End{Reason: ReasonMemory, Detail: m.ram.verifier.wait().Error()})
	case <-m.closing:
	}
}

// finish moves the machine to ended.
func (m *Machine) finish(end End) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.haltLocked()
	for _, s := range m.bus.slots {
		if err := s.transport.Pause(); err != nil {
			m.log.Error().Err(err).Msg("quiesce device of an ended guest")
		}
	}
	if err := m.flushLocked(); err != nil {
		m.log.Error().Err(err).Msg("flush disks of an ended guest")
	}
	if m.console != nil {
		m.console.Flush()
		end.ConsoleTail = m.console.Tail(consoleTailBytes)
	}
	if m.vsock != nil {
		_ = m.vsock.Close() // whoever talks to the guest must not wait for it
	}
	m.end = m.diagnose(end)
	m.state.Store(int32(Ended))
	m.log.Info().Str("reason", string(m.end.Reason)).Str("detail", m.end.Detail).Msg("guest ended")
	close(m.done)
}

// diagnose tells a panic, after which a kernel resets (panic=-1), from a reboot. The boot flag says so; so does the console of
// a kernel whose command line does not make it set the flag.
func (m *Machine) diagnose(end End) End {
	if end.Reason != ReasonReset {
		return end
	}
	line := panicLine(end.ConsoleTail)
	flag, err := m.ram.mem.ReadUint16(bootFlag)
	switch {
	case line != "":
		end.Reason, end.Detail = ReasonPanic, line
	case err == nil && flag == warmBoot:
		end.Reason, end.Detail = ReasonPanic, "the kernel panicked"
	}
	return end
}

// panicLine returns the last line of the console that says why a kernel panicked, "" if none does.
func panicLine(tail []byte) string {
	at := bytes.LastIndex(tail, []byte("Kernel panic - "))
	if at < 0 {
		return ""
	}
	line, _, _ := bytes.Cut(tail[at:], []byte("\n"))
	return string(bytes.TrimRight(line, "\r"))
}

// Done is closed when the guest has ended.
func (m *Machine) Done() <-chan struct{} { return m.done }

// End returns how the guest ended. Preconditions: Done is closed.
func (m *Machine) End() End { return m.end }
