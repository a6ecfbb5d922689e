package machine

import (
	"net"
	"slices"
	"strings"
	"testing"
)

// Ends are told apart by what the guest did, with a console and without.
func TestEndsAreSeenAsWhatTheyAre(t *testing.T) {
	const line = "Kernel panic - not syncing: no init"
	warm := []byte{0x34, 0x12}
	for _, c := range []struct {
		name    string
		command byte
		console string // what the guest printed
		flag    []byte // what it left at bootFlag
		reason  Reason
		detail  string // a part of it
	}{
		{"reset by the keyboard controller", tinyReset, "bye\r\n", nil, ReasonReset, "reset"},
		{"triple fault", tinyFault, "bye\r\n", nil, ReasonReset, "triple fault"},
		{"ACPI S5", tinyPowerOff, "bye\r\n", nil, ReasonPowerOff, "turned the machine off"},
		{"panic", tinyReset, "[    1.0] " + line + "\r\n[    1.1] Rebooting.", warm, ReasonPanic, line},
		{"panic by a triple fault", tinyFault, line + "\n", warm, ReasonPanic, line},
		{"panic without the flag", tinyReset, "x\n" + line, nil, ReasonPanic, line},
		{"panic that was not printed", tinyReset, "", warm, ReasonPanic, "panicked"},
		{"the newest panic is told", tinyReset, "Kernel panic - old\n" + line + "\n", warm, ReasonPanic, line},
		{"power-off of a kernel that speaks of panics", tinyPowerOff, line + "\n", warm, ReasonPowerOff, "turned the machine off"},
		{"a cold boot", tinyReset, "bye\n", []byte{0, 0}, ReasonReset, "reset"},
	} {
		for _, console := range []bool{true, false} {
			if !console && c.flag == nil && c.reason == ReasonPanic {
				continue // nothing tells
			}
			cfg := testConfig(1, 128*mib)
			if !console {
				cfg.Console = nil
			}
			m := bootTiny(t, cfg)
			if console {
				_, _ = m.console.Write([]byte(c.console))
			}
			m.poke(t, bootFlag, c.flag...)
			m.poke(t, tinyCommand, c.command)
			<-m.Done()
			end := m.End()
			if end.Reason != c.reason || console && !strings.Contains(end.Detail, c.detail) {
				t.Errorf("%s, console %v: ended by %s: %s", c.name, console, end.Reason, end.Detail)
			}
			if want := []byte(c.console); console && !slices.Equal(end.ConsoleTail, want) || !console && end.ConsoleTail != nil {
				t.Errorf("%s: console tail %q", c.name, end.ConsoleTail)
			}
		}
	}
}

// Nobody is left waiting for a guest that has ended.
func TestEndedGuestIsNotListenedFor(t *testing.T) {
	cfg := attackedConfig(t)
	socket := cfg.Vsock.Listener.Addr().String()
	m := bootTiny(t, cfg)
	c, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	m.poke(t, tinyCommand, tinyReset)
	<-m.Done()
	if c, err := net.Dial("unix", socket); err == nil {
		_ = c.Close()
		t.Error("the socket of an ended guest takes connections")
	}
}

// What KVM itself says of a guest's end.
func TestSystemEvents(t *testing.T) {
	for kind, want := range map[uint32]Reason{1: ReasonPowerOff, 2: ReasonReset, 3: ReasonPanic, 0: ReasonError, 77: ReasonError} {
		if got := systemEvent(kind); got.Reason != want || got.Detail == "" {
			t.Errorf("event %d: %+v", kind, got)
		}
	}
}
