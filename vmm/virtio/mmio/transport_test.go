package mmio_test

import (
	"encoding/binary"
	"errors"
	"slices"
	"sync/atomic"
	"testing"

	"torpor/vmm/guestmem"
	"torpor/vmm/virtio/mmio"
	"torpor/vmm/virtio/virtq"
)

const memory = 64 << 10

// probe is a device that records what is done to it and complains when the transport breaks its promises.
type probe struct {
	t        testing.TB
	irq      mmio.Interrupt
	calls    []string
	notified []int
	active   bool
	paused   bool
	refuse   error
	features uint64
	state    []byte
}

func (p *probe) ID() uint32           { return 42 }
func (p *probe) Features() uint64     { return 1<<5 | 1<<40 }
func (p *probe) QueueSizes() []uint16 { return []uint16{16, 4} }

func (p *probe) ReadConfig(off uint64, b []byte) {
	for i := range b {
		b[i] = byte(off) + byte(i)
	}
}

func (p *probe) WriteConfig(off uint64, b []byte) { p.calls = append(p.calls, "config") }

func (p *probe) Activate(features uint64, queues []*virtq.Queue, irq mmio.Interrupt) error {
	p.call("activate", !p.active)
	if len(queues) != 2 || queues[0] == nil || queues[1] == nil {
		p.t.Errorf("activated with queues %v", queues)
	}
	p.irq, p.features = irq, features
	p.active = p.refuse == nil
	return p.refuse
}

func (p *probe) Notify(queue int) {
	if !p.active || p.paused || queue < 0 || queue > 1 {
		p.t.Errorf("queue %d notified, active %v, paused %v", queue, p.active, p.paused)
	}
	p.notified = append(p.notified, queue)
}

func (p *probe) Reset() {
	p.call("reset", p.active)
	p.active, p.paused = false, false
}

func (p *probe) Pause() error {
	p.call("pause", p.active && !p.paused)
	p.paused = true
	return nil
}

func (p *probe) Resume() error {
	p.call("resume", p.active && p.paused)
	p.paused = false
	return nil
}

func (p *probe) Save() ([]byte, error) {
	p.call("save", p.active && p.paused)
	return []byte("state"), nil
}

func (p *probe) Load(state []byte) error {
	p.call("load", !p.active)
	p.state, p.paused = state, true
	return nil
}

func (p *probe) call(name string, allowed bool) {
	if !allowed {
		p.t.Errorf("%s, while active %v, paused %v", name, p.active, p.paused)
	}
	p.calls = append(p.calls, name)
}

type bench struct {
	t       testing.TB
	dev     *probe
	mem     *guestmem.Memory
	tr      *mmio.Transport
	signals atomic.Int32
}

func newBench(t testing.TB) *bench {
	t.Helper()
	mem, err := guestmem.New([]guestmem.Region{{GPA: 0, Bytes: make([]byte, memory)}})
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{t: t, dev: &probe{t: t}, mem: mem}
	b.tr = mmio.NewTransport(b.dev, mem, func() { b.signals.Add(1) })
	return b
}

func (b *bench) get(off uint64) uint32 {
	var p [4]byte
	b.tr.Read(off, p[:])
	return binary.LittleEndian.Uint32(p[:])
}

func (b *bench) set(off uint64, v uint32) { b.tr.Write(off, binary.LittleEndian.AppendUint32(nil, v)) }

// sets is a list of writes: offset, value, offset, value, ...
func (b *bench) sets(pairs ...uint32) {
	for p := range slices.Chunk(pairs, 2) {
		b.set(uint64(p[0]), p[1])
	}
}

func (b *bench) status(want uint32) {
	b.t.Helper()
	if got := b.get(0x70); got != want {
		b.t.Errorf("status %#x, want %#x", got, want)
	}
}

// negotiate goes to FEATURES_OK with VERSION_1 and the given low features.
func (b *bench) negotiate(low uint32) {
	b.sets(0x70, 0, 0x70, 1, 0x70, 3, 0x24, 0, 0x20, low, 0x24, 1, 0x20, 1, 0x70, 11)
}

func (b *bench) queue(i uint32, num uint32) {
	b.sets(0x30, i, 0x38, num,
		0x80, 0x1000*(i+1), 0x84, 0, 0x90, 0x1000*(i+1)+0x400, 0x94, 0, 0xa0, 0x1000*(i+1)+0x800, 0xa4, 0, 0x44, 1)
}

func (b *bench) up() {
	b.t.Helper()
	b.negotiate(1 << 5)
	b.queue(0, 16)
	b.queue(1, 4)
	b.set(0x70, 15)
	b.status(15)
}

func TestIdentity(t *testing.T) {
	b := newBench(t)
	for off, want := range map[uint64]uint32{
		0x00: 0x74726976, 0x04: 2, 0x08: 42, 0x70: 0, 0x60: 0, 0x44: 0, 0x34: 16,
		0xb0: 0xffffffff, 0xb4: 0xffffffff, 0x0c8: 0, 0x0fc: 0, 0x010: 1<<5 | 1<<29,
	} {
		if got := b.get(off); got != want {
			t.Errorf("register %#x is %#x, want %#x", off, got, want)
		}
	}
	b.set(0x14, 1)
	if got := b.get(0x10); got != 1|1<<8 {
		t.Errorf("high features %#x", got)
	}
	for _, sel := range []uint32{2, 1<<32 - 1} {
		b.sets(0x14, sel, 0x30, sel)
		if b.get(0x10) != 0 || b.get(0x34) != 0 || b.get(0x44) != 0 {
			t.Errorf("something at selector %d", sel)
		}
	}
}

func TestConfigSpaceAndOddAccesses(t *testing.T) {
	b := newBench(t)
	p := []byte{9, 9, 9}
	b.tr.Read(0x105, p)
	if !slices.Equal(p, []byte{5, 6, 7}) {
		t.Errorf("config %v", p)
	}
	b.tr.Write(0x100, []byte{1})
	if !slices.Equal(b.dev.calls, []string{"config"}) {
		t.Errorf("calls %v", b.dev.calls)
	}
	for _, off := range []uint64{0, 0x70, 0x1000, 1 << 63, 1<<64 - 1} {
		p := []byte{9, 9}
		b.tr.Read(off, p)
		if !slices.Equal(p, []byte{0, 0}) {
			t.Errorf("two bytes at %#x are %v", off, p)
		}
		b.tr.Write(off, []byte{1})
		b.tr.Write(off, nil)
		b.tr.Write(off, make([]byte, 8))
	}
	b.status(0)
}

func TestStatusMachine(t *testing.T) {
	for _, c := range []struct {
		name   string
		writes []uint32
		want   uint32
	}{
		{"in order", []uint32{0x70, 1, 0x70, 3, 0x24, 1, 0x20, 1, 0x70, 11}, 11},
		{"driver before acknowledge", []uint32{0x70, 2}, 0},
		{"driver ok at once", []uint32{0x70, 4}, 0},
		{"driver ok before features ok", []uint32{0x70, 1, 0x70, 3, 0x70, 7}, 3},
		{"without VERSION_1", []uint32{0x70, 1, 0x70, 3, 0x70, 11}, 3},
		{"with a feature not offered", []uint32{0x70, 1, 0x70, 3, 0x24, 1, 0x20, 1, 0x24, 0, 0x20, 1 << 7, 0x70, 11}, 3},
		{"bits are not taken back", []uint32{0x70, 1, 0x70, 3, 0x70, 1}, 3},
		{"reset", []uint32{0x70, 1, 0x70, 3, 0x70, 0}, 0},
		{"failed", []uint32{0x70, 1, 0x70, 0x81, 0x70, 0x83}, 0x81},
		{"failed, then reset", []uint32{0x70, 1, 0x70, 0x81, 0x70, 0}, 0},
		{"features before driver", []uint32{0x70, 1, 0x24, 1, 0x20, 1, 0x70, 3, 0x70, 11}, 3},
		{"needs-reset is not the driver's to set", []uint32{0x70, 0x41}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			b.sets(c.writes...)
			b.status(c.want)
		})
	}
}

func TestFeaturesFreezeAtFeaturesOK(t *testing.T) {
	b := newBench(t)
	b.negotiate(1 << 5)
	b.sets(0x24, 0, 0x20, 0)
	b.queue(0, 16)
	b.queue(1, 4)
	b.set(0x70, 15)
	if b.dev.features != 1<<5|1<<32 {
		t.Errorf("features %#x", b.dev.features)
	}
}

func TestQueueSetup(t *testing.T) {
	const needsReset = 15 | 64
	for _, c := range []struct {
		name  string
		setup func(b *bench)
		want  uint32
	}{
		{"both", func(b *bench) { b.queue(0, 16); b.queue(1, 4) }, 15},
		{"smaller", func(b *bench) { b.queue(0, 2); b.queue(1, 1) }, 15},
		{"one is missing", func(b *bench) { b.queue(0, 16) }, needsReset},
		{"one was taken back", func(b *bench) { b.queue(0, 16); b.queue(1, 4); b.set(0x44, 0) }, needsReset},
		{"outside memory", func(b *bench) { b.queue(0, 16); b.queue(1, 4); b.sets(0x44, 0, 0xa4, 1, 0x44, 1) }, needsReset},
		{"misaligned", func(b *bench) { b.queue(0, 16); b.queue(1, 4); b.sets(0x44, 0, 0x80, 0x1008, 0x44, 1) }, needsReset},
		{"a size that cannot be is ignored", func(b *bench) { b.queue(0, 16); b.queue(1, 1<<16|3) }, 15},
		{"locked once ready", func(b *bench) { b.queue(0, 16); b.queue(1, 4); b.sets(0xa0, 0xffffff00, 0x38, 2) }, 15},
		{"a queue there is not", func(b *bench) { b.queue(0, 16); b.queue(1, 4); b.queue(2, 4) }, 15},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			b.negotiate(0)
			c.setup(b)
			b.set(0x70, 15)
			b.status(c.want)
			if broken := c.want == needsReset; broken != (b.get(0x60) == 2 && b.signals.Load() == 1) {
				t.Errorf("interrupt status %d, %d signals", b.get(0x60), b.signals.Load())
			}
			b.set(0x50, 0)
			if (len(b.dev.notified) > 0) == (c.want == needsReset) {
				t.Errorf("notified %v", b.dev.notified)
			}
			b.set(0x70, 0)
			b.status(0)
			b.up()
		})
	}
	t.Run("before features ok", func(t *testing.T) {
		b := newBench(t)
		b.sets(0x70, 1, 0x70, 3)
		b.queue(0, 16)
		if b.get(0x44) != 0 {
			t.Error("ready")
		}
	})
}

func TestActivationFails(t *testing.T) {
	b := newBench(t)
	b.dev.refuse = errors.New("no")
	b.negotiate(0)
	b.queue(0, 16)
	b.queue(1, 4)
	b.set(0x70, 15)
	b.status(15 | 64)
	b.set(0x50, 0)
	b.set(0x70, 0)
	b.dev.refuse = nil
	b.up()
}

func TestInterrupts(t *testing.T) {
	b := newBench(t)
	b.up()
	b.dev.irq.Used()
	b.dev.irq.Config()
	if b.get(0x60) != 3 || b.signals.Load() != 2 || b.get(0xfc) != 1 {
		t.Errorf("status %d, %d signals, generation %d", b.get(0x60), b.signals.Load(), b.get(0xfc))
	}
	b.set(0x64, 1)
	if b.get(0x60) != 2 {
		t.Errorf("status %d after one was acknowledged", b.get(0x60))
	}
	b.dev.irq.NeedsReset()
	b.dev.irq.NeedsReset()
	b.status(15 | 64)
	if b.signals.Load() != 3 {
		t.Errorf("%d signals", b.signals.Load())
	}
	b.set(0x70, 0)
	b.status(0)
	if b.get(0x60) != 0 || !slices.Equal(b.dev.calls, []string{"activate", "reset"}) {
		t.Errorf("interrupt status %d, calls %v", b.get(0x60), b.dev.calls)
	}
}

func TestPauseAndResume(t *testing.T) {
	b := newBench(t)
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	// A device without a driver has nothing to pause.
	check(b.tr.Pause())
	check(b.tr.Resume())
	if b.signals.Load() != 0 || len(b.dev.calls) != 0 {
		t.Errorf("%d signals, calls %v", b.signals.Load(), b.dev.calls)
	}
	b.up()
	for range 2 {
		check(b.tr.Pause())
	}
	b.set(0x50, 1)
	if len(b.dev.notified) != 0 {
		t.Errorf("notified %v during a pause", b.dev.notified)
	}
	for range 2 {
		check(b.tr.Resume())
	}
	if !slices.Equal(b.dev.notified, []int{0, 1}) || b.get(0x60) != 1 || b.signals.Load() != 1 {
		t.Errorf("after resume: notified %v, interrupt status %d, %d signals", b.dev.notified, b.get(0x60), b.signals.Load())
	}
	if want := []string{"activate", "pause", "resume"}; !slices.Equal(b.dev.calls, want) {
		t.Errorf("calls %v, want %v", b.dev.calls, want)
	}
	if _, err := b.tr.Save(); !errors.Is(err, mmio.ErrNotPaused) {
		t.Errorf("saved a running device: %v", err)
	}
}

// directProbe serves its second queue where its notifications come in.
type directProbe struct {
	*probe
	served []int
	work   func()
}

func (p *directProbe) Waits(queue int) bool { return queue == 1 }

func (p *directProbe) Serve(queue int) func() {
	p.call("serve", p.active && !p.paused && queue == 1)
	p.served = append(p.served, queue)
	return p.work
}

// A queue that is served directly is served while the device runs, and without the transport's lock.
func TestServe(t *testing.T) {
	b := newBench(t)
	b.up()
	b.tr.Serve(1) // of a device that serves nothing
	p := &directProbe{probe: b.dev}
	worked := 0
	p.work = func() {
		worked++
		b.set(0x50, 0) // a register, by the guest
	}
	b.dev.active = false
	b.tr = mmio.NewTransport(p, b.mem, func() { b.signals.Add(1) })
	b.tr.Serve(1)
	b.up()
	for _, queue := range []int{1, -1, 2} {
		b.tr.Serve(queue)
	}
	if worked != 1 || !slices.Equal(p.served, []int{1}) || !slices.Equal(b.dev.notified, []int{0}) {
		t.Errorf("worked %d times, served %v, notified %v", worked, p.served, b.dev.notified)
	}
	if err := b.tr.Pause(); err != nil {
		t.Fatal(err)
	}
	b.tr.Serve(1)
	if err := b.tr.Resume(); err != nil {
		t.Fatal(err)
	}
	p.work = nil // nothing to do after all
	b.tr.Serve(1)
	b.set(0x70, 0)
	b.tr.Serve(1)
	if worked != 1 || !slices.Equal(p.served, []int{1, 1}) {
		t.Errorf("worked %d times, served %v", worked, p.served)
	}
}

// saved brings b to a state, saves it, and loads it into a fresh transport over the same memory.
func saved(t *testing.T, b *bench) (*bench, []byte) {
	t.Helper()
	if err := b.tr.Pause(); err != nil {
		t.Fatal(err)
	}
	state, err := b.tr.Save()
	if err != nil {
		t.Fatal(err)
	}
	n := newBench(t)
	n.mem = b.mem
	n.tr = mmio.NewTransport(n.dev, n.mem, func() { n.signals.Add(1) })
	if err := n.tr.Load(state); err != nil {
		t.Fatal(err)
	}
	return n, state
}

func TestSaveAndLoad(t *testing.T) {
	for name, bring := range map[string]func(b *bench){
		"untouched":  func(*bench) {},
		"negotiated": func(b *bench) { b.negotiate(1 << 5) },
		"half way":   func(b *bench) { b.negotiate(0); b.queue(1, 2) },
		"running":    func(b *bench) { b.up(); b.dev.irq.Config(); b.sets(0x14, 1, 0x30, 1) },
		"broken":     func(b *bench) { b.up(); b.dev.irq.NeedsReset() },
		"failed":     func(b *bench) { b.negotiate(0); b.set(0x70, 15) },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			bring(b)
			n, state := saved(t, b)
			for off := uint64(0); off < 0x100; off += 4 {
				if n.get(off) != b.get(off) {
					t.Errorf("register %#x is %#x, was %#x", off, n.get(off), b.get(off))
				}
			}
			if again, err := n.tr.Save(); err != nil || !slices.Equal(again, state) {
				t.Errorf("saved again: other bytes, %v", err)
			}
			if err := n.tr.Resume(); err != nil {
				t.Fatal(err)
			}
			if b.dev.active != n.dev.active || n.dev.active && !slices.Equal(n.dev.notified, []int{0, 1}) {
				t.Errorf("active %v, notified %v", n.dev.active, n.dev.notified)
			}
			if n.dev.active && string(n.dev.state) != "state" {
				t.Errorf("device state %q", n.dev.state)
			}
			n.set(0x70, 0)
			n.up()
		})
	}
}

func TestLoadRefuses(t *testing.T) {
	b := newBench(t)
	b.up()
	_, state := saved(t, b)
	for n := range state {
		if err := newBench(t).tr.Load(state[:n]); err == nil {
			t.Fatalf("took %d of %d bytes", n, len(state))
		}
	}
	for name, harm := range map[string]func(s []byte){
		"version":          func(s []byte) { s[0]++ },
		"device":           func(s []byte) { s[4]++ },
		"number of queues": func(s []byte) { s[36]++ },
		"features":         func(s []byte) { s[40] = 0xff },
		"queue address":    func(s []byte) { s[56+7] = 1 },
		"queue size":       func(s []byte) { s[56+24] = 3 },
	} {
		bad := slices.Clone(state)
		harm(bad)
		if err := newBench(t).tr.Load(bad); err == nil {
			t.Errorf("took a state with another %s", name)
		}
	}
	if err := newBench(t).tr.Load(append(slices.Clone(state), 0)); err == nil {
		t.Error("took a byte too many")
	}
	if err := b.tr.Load(state); err == nil {
		t.Error("loaded over a running device")
	}
}

// FuzzRegisters does anything to the register file, pauses and snapshots included; the probe watches the order of calls.
func FuzzRegisters(f *testing.F) {
	f.Add([]byte{0x70, 0, 1, 0x70, 0, 3, 0x24, 0, 1, 0x20, 0, 1, 0x70, 0, 11})
	f.Add([]byte{0x30, 0, 0, 0x38, 0, 16, 0x81, 0, 0x10, 0x44, 0, 1, 0x70, 0, 15, 0x50, 0, 0})
	f.Add([]byte{2, 0, 0, 6, 0, 0, 0x50, 0, 0, 10, 0, 0, 0x70, 0, 0})
	f.Fuzz(func(t *testing.T, script []byte) {
		for _, initialised := range []bool{false, true} {
			b := newBench(t)
			if initialised {
				b.up()
			}
			for op := script; len(op) >= 3; op = op[3:] {
				off, v := uint64(op[0])|uint64(op[1])<<8, uint32(op[2])
				switch {
				case off%4 == 0:
					b.set(off, v)
				case off%4 == 1:
					b.set(off&^3, v<<8|v<<24)
				case off == 2:
					_ = b.tr.Pause()
				case off == 6:
					_ = b.tr.Resume()
				case off == 10:
					if state, err := b.tr.Save(); err == nil {
						if err := newBench(t).tr.Load(state); err != nil {
							t.Fatalf("cannot load what was saved: %v", err)
						}
					}
				default:
					b.tr.Write(off, op[2:3])
				}
				b.get(off)
			}
			b.tr.Close()
		}
	})
}

// FuzzLoad takes any bytes for a saved transport.
func FuzzLoad(f *testing.F) {
	b := newBench(f)
	b.up()
	if err := b.tr.Pause(); err != nil {
		f.Fatal(err)
	}
	state, err := b.tr.Save()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(state)
	f.Add(state[:len(state)-1])
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, state []byte) {
		b := newBench(t)
		if b.tr.Load(state) == nil {
			_ = b.tr.Resume()
			b.set(0x50, 0)
		}
		b.tr.Close()
	})
}
