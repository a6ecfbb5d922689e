package legacy_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"torpor/vmm/legacy"
)

func TestAbsentPortsReadAsOnes(t *testing.T) {
	p := legacy.Ports{SleepPort: 0x600, SleepType: 5}
	for port := range uint16(0x800) {
		data := []byte{0x55, 0x55, 0x55, 0x55} // what the last exit left behind must not leak to the guest
		p.In(port, 4, data)
		want := []byte{0xff, 0xff, 0xff, 0xff}
		if port == 0x64 || port == 0x600 || port == 0x601 {
			want[0] = 0
		}
		if !bytes.Equal(data, want) {
			t.Errorf("port %#x reads % x", port, data)
		}
	}
}

func TestPortEvents(t *testing.T) {
	p := legacy.Ports{SleepPort: 0x600, SleepType: 5}
	for _, c := range []struct {
		port uint16
		data []byte
		want legacy.Event
	}{
		{0x64, []byte{0xfe}, legacy.Reset},
		{0x64, []byte{0x60}, legacy.None},
		{0x600, []byte{5<<2 | 1<<5}, legacy.PowerOff},
		{0x600, []byte{5 << 2}, legacy.None},
		{0x600, []byte{4<<2 | 1<<5}, legacy.None},
		{0x601, []byte{0x80}, legacy.None},
		{0x80, []byte{0xfe}, legacy.None},
		{0x64, []byte{0, 0, 0xfe}, legacy.Reset}, // rep outsb
		{0x64, nil, legacy.None},
	} {
		if got := p.Out(c.port, 1, c.data); got != c.want {
			t.Errorf("out %#x % x: event %d, want %d", c.port, c.data, got, c.want)
		}
	}
}

type uart struct {
	*legacy.Serial
	out  bytes.Buffer
	irqs int
}

func newUART() *uart {
	u := &uart{}
	u.Serial = legacy.NewSerial(&u.out, func() { u.irqs++ })
	return u
}

// What Linux's 8250 driver does to find a 16550A and to write to it.
func TestSerialLooksLikeA16550A(t *testing.T) {
	u := newUART()
	u.Write(1, 0) // IER
	if u.Read(1) != 0 {
		t.Error("IER does not clear")
	}
	u.Write(1, 0x0f)
	if u.Read(1) != 0x0f {
		t.Error("IER does not set")
	}
	u.Write(1, 0)
	u.Write(4, 0x1a) // loop-back, RTS, OUT2
	if got := u.Read(6) & 0xf0; got != 0x90 {
		t.Errorf("loop-back status %#x", got)
	}
	u.Write(4, 0x0b)
	u.Write(2, 1) // FIFO on
	if got := u.Read(2); got>>6 != 3 {
		t.Errorf("IIR %#x: no FIFO", got)
	}
	u.Write(7, 0xa5)
	if u.Read(7) != 0xa5 {
		t.Error("scratch register")
	}
	u.Write(3, 0x80) // DLAB
	u.Write(0, 1)
	u.Write(1, 2)
	if u.Read(0) != 1 || u.Read(1) != 2 {
		t.Error("divisor")
	}
	u.Write(3, 3)
	for _, b := range []byte("hi\n") {
		if u.Read(5)&0x20 == 0 {
			t.Fatal("transmitter is not empty")
		}
		u.Write(0, b)
	}
	if u.out.String() != "hi\n" {
		t.Errorf("wrote %q", u.out.String())
	}
}

func TestSerialInterrupts(t *testing.T) {
	u := newUART()
	u.Write(0, 'a')
	if u.irqs != 0 || u.Read(2)&0xf != 1 {
		t.Error("interrupt without being enabled")
	}
	u.Write(1, 2) // enabling it with an empty transmitter raises it
	if u.irqs != 1 || u.Read(2)&0xf != 2 {
		t.Errorf("%d interrupts", u.irqs)
	}
	if u.Read(2)&0xf != 1 {
		t.Error("reading IIR does not take the interrupt back")
	}
	u.Write(0, 'b')
	if u.irqs != 2 {
		t.Errorf("%d interrupts after a byte", u.irqs)
	}
}

// A driver that waits for "transmitter empty" when it is saved must be woken where it is restored.
func TestSerialSurvivesASnapshot(t *testing.T) {
	u := newUART()
	u.Write(3, 0x80)
	u.Write(0, 9)
	u.Write(3, 3)
	u.Write(1, 2)
	u.Write(0, 'x')
	r := newUART()
	if err := r.Load(u.Save()); err != nil {
		t.Fatal(err)
	}
	r.Resume()
	if r.irqs != 1 || r.Read(2)&0xf != 2 || r.Read(3) != 3 || r.Read(1) != 2 {
		t.Errorf("%d interrupts, LCR %#x", r.irqs, r.Read(3))
	}
	if !bytes.Equal(u.Save()[:7], r.Save()[:7]) {
		t.Error("registers differ")
	}
	for _, bad := range [][]byte{nil, make([]byte, 7), make([]byte, 9), {0, 0, 0, 0, 0, 0, 0, 2}} {
		if newUART().Load(bad) == nil {
			t.Errorf("accepted % x", bad)
		}
	}
}

func openLog(t *testing.T, path string, limit uint64) *legacy.Log {
	t.Helper()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	l, err := legacy.NewLog(f, limit)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestLogKeepsTheNewest(t *testing.T) {
	path := filepath.Join(t.TempDir(), "console.log")
	const limit = 16 << 10
	l := openLog(t, path, limit)
	var all strings.Builder
	for i := range 5000 {
		line := fmt.Sprintf("line %d\n", i)
		all.WriteString(line)
		for _, b := range []byte(line) {
			_, _ = l.Write([]byte{b})
		}
		if i%500 != 0 {
			continue
		}
		if info, err := os.Stat(path); err != nil || info.Size() > limit {
			t.Fatalf("log is %d bytes (%v)", info.Size(), err)
		}
	}
	_, _ = l.Write([]byte("no line break"))
	all.WriteString("no line break")
	if got, want := string(l.Tail(100)), all.String()[all.Len()-100:]; got != want {
		t.Errorf("tail %q, want %q", got, want)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) < limit/2 || len(got) > limit || !strings.HasSuffix(all.String(), string(got)) {
		t.Errorf("%d bytes kept, not the newest ones", len(got))
	}
	if entries, _ := os.ReadDir(filepath.Dir(path)); len(entries) != 1 {
		t.Errorf("%d files left", len(entries))
	}
}

func TestLogGoesOnInAnExistingFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "console.log")
	for _, part := range []string{"one\n", "two\n"} {
		l := openLog(t, path, 0)
		_, _ = l.Write([]byte(part))
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if got, _ := os.ReadFile(path); string(got) != "one\ntwo\n" {
		t.Errorf("%q", got)
	}
}

// A guest's console is not worth its life: a log that cannot be written is dropped and remembered.
func TestLogSurvivesAFullDisk(t *testing.T) {
	f, err := os.OpenFile("/dev/full", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("needs /dev/full: %v", err)
	}
	l, err := legacy.NewLog(f, 0)
	if err != nil {
		t.Fatal(err)
	}
	for range 100 {
		if _, err := l.Write([]byte("text\n")); err != nil {
			t.Fatal(err)
		}
	}
	if l.Err() == nil {
		t.Error("the error was not remembered")
	}
	if got := string(l.Tail(5)); got != "text\n" {
		t.Errorf("tail %q", got)
	}
	if l.Close() == nil {
		t.Error("close does not tell")
	}
}

func FuzzPorts(f *testing.F) {
	f.Add(uint16(0x3f8), 1, []byte("hello"), []byte{0x80, 1, 2})
	f.Fuzz(func(t *testing.T, port uint16, size int, out, in []byte) {
		u := newUART()
		p := legacy.Ports{Serial: u.Serial, SleepPort: 0x600, SleepType: 5}
		p.Out(port, size, out)
		p.In(port, size, in)
		if err := u.Load(u.Save()); err != nil {
			t.Error(err)
		}
	})
}
