package machine

import "bytes"

// Reason is why a guest ended.
type Reason string

// The reasons.
const (
	ReasonReset    Reason = "reset"    // it rebooted; the machine does not
	ReasonPowerOff Reason = "poweroff" // ACPI S5
	ReasonPanic    Reason = "panic"    // its kernel panicked and then reset
	ReasonMemory   Reason = "memory"   // a page of its RAM cannot be read: the file under it was cut short or its disk failed
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

// supervise waits for a vCPU to report the guest's end, then stops the rest. It ends with the machine.
func (m *Machine) supervise() {
	defer close(m.supervised)
	select {
	case end := <-m.endings:
		m.finish(end)
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
		// A panicking kernel resets like a rebooting one (panic=-1); what it said last tells them apart.
		if end.Reason == ReasonReset && bytes.Contains(end.ConsoleTail, []byte("Kernel panic")) {
			end.Reason, end.Detail = ReasonPanic, panicLine(end.ConsoleTail)
		}
	}
	m.end = end
	m.state.Store(int32(Ended))
	m.log.Info().Str("reason", string(end.Reason)).Str("detail", end.Detail).Msg("guest ended")
	close(m.done)
}

// panicLine returns the line of the console that says why the kernel panicked.
func panicLine(tail []byte) string {
	_, rest, _ := bytes.Cut(tail, []byte("Kernel panic"))
	line, _, _ := bytes.Cut(rest, []byte("\n"))
	return "Kernel panic" + string(bytes.TrimRight(line, "\r"))
}

// Done is closed when the guest has ended.
func (m *Machine) Done() <-chan struct{} { return m.done }

// End returns how the guest ended. Preconditions: Done is closed.
func (m *Machine) End() End { return m.end }
