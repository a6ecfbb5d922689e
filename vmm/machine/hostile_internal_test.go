package machine

import (
	"encoding/binary"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"torpor/vmm/cow"
	"torpor/vmm/guestmem"
	"torpor/vmm/kvm"
	"torpor/vmm/virtio"
	"torpor/vmm/virtio/mmio"
	"torpor/vmm/x86"
)

const (
	ringsAddr  = guestmem.Addr(0x3000000) // 64 KiB per queue: descriptors, available ring, used ring
	ringStride = 0x10000
	availOff   = 0x4000
	usedOff    = 0x8000
	ringSize   = 16
	bufsAddr   = guestmem.Addr(0x4000000) // what descriptors point to
	canaryAddr = guestmem.Addr(0x7000000) // what nobody may write to

	descNext, descWrite, descIndirect = 1, 2, 4
	stNeedsReset                      = 64
)

// target is one device of the attacked machine.
type target struct {
	name     string
	slot     int
	queues   int
	harmed   int    // the queue that gets the bad requests
	features uint32 // low half
}

var targets = []target{
	{"block", 0, 1, 0, 0}, {"vsock", 1, 3, 1, 0}, {"rng", 2, 1, 0, 0}, {"balloon", 3, 4, 0, 1<<1 | 1<<5},
}

func attackedConfig(t *testing.T) Config {
	dir := t.TempDir()
	base, top := filepath.Join(dir, "base"), filepath.Join(dir, "top")
	if err := os.WriteFile(base, make([]byte, mib), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := cow.Create(top, mib); err != nil {
		t.Fatal(err)
	}
	cfg := balloonConfig()
	cfg.Disks = []Disk{{ID: "d", Base: openFile(t, base, os.O_RDONLY), Top: openFile(t, top, os.O_RDWR)}}
	cfg.Vsock = &Vsock{CID: 3, Listener: listenVsock(t, filepath.Join(dir, "vsock"))}
	return cfg
}

// ring is where the guest says a queue is.
type ring struct{ desc, avail, used uint64 }

func ringOf(queue int) ring {
	at := uint64(ringsAddr) + uint64(queue)*ringStride
	return ring{at, at + availOff, at + usedOff}
}

// initialise is the driver's part up to DRIVER_OK. change may tamper with a queue's place.
func (d target) initialise(change func(queue int, r *ring)) (s []step) {
	set := func(off, v uint64) { s = append(s, step{step32, reg(d.slot, off), v}) }
	for _, w := range [][2]uint64{{0x70, 0}, {0x70, 1}, {0x70, 3}, {0x24, 0}, {0x20, uint64(d.features)}, {0x24, 1}, {0x20, 1}, {0x70, 11}} {
		set(w[0], w[1])
	}
	for q := range d.queues {
		r := ringOf(q)
		if change != nil {
			change(q, &r)
		}
		set(0x30, uint64(q))
		set(0x38, ringSize)
		for off, v := range map[uint64]uint64{0x80: r.desc, 0x90: r.avail, 0xa0: r.used} {
			set(off, v&0xffffffff)
			set(off+4, v>>32)
		}
		set(0x44, 1)
	}
	set(0x70, 15)
	return s
}

func (d target) notify() step { return step{step32, reg(d.slot, 0x50), uint64(d.harmed)} }

func (a *attacker) desc(d target, i int, at uint64, n uint32, flags, next uint16) {
	b := binary.LittleEndian.AppendUint64(nil, at)
	b = binary.LittleEndian.AppendUint32(b, n)
	b = binary.LittleEndian.AppendUint16(b, flags)
	b = binary.LittleEndian.AppendUint16(b, next)
	a.poke(a.t, guestmem.Addr(ringOf(d.harmed).desc)+guestmem.Addr(16*i), b...)
}

// publish fills the available ring with heads and sets its index.
func (a *attacker) publish(d target, idx uint16, heads ...uint16) {
	b := binary.LittleEndian.AppendUint16(nil, 0)
	b = binary.LittleEndian.AppendUint16(b, idx)
	for _, h := range heads {
		b = binary.LittleEndian.AppendUint16(b, h)
	}
	a.poke(a.t, guestmem.Addr(ringOf(d.harmed).avail), b...)
}

// prepare empties the rings and buffers and sets the canary.
func (a *attacker) prepare() {
	a.t.Helper()
	for _, part := range []struct {
		at guestmem.Addr
		n  uint64
	}{{ringsAddr, 4 * ringStride}, {bufsAddr, mib}} {
		if err := a.ram.mem.Zero(part.at, part.n); err != nil {
			a.t.Fatal(err)
		}
	}
	a.poke(a.t, canaryAddr, canary()...)
}

func canary() []byte {
	b := make([]byte, 64<<10)
	for i := range b {
		b[i] = byte(i*7 + i>>8)
	}
	return b
}

// healthy fails the test unless the machine is all right: it runs, pauses and resumes, and wrote where it should only.
func (a *attacker) healthy() {
	a.t.Helper()
	if s := a.Status(); s.State != Running {
		a.t.Fatalf("the machine is %v: %+v", s.State, s.End)
	}
	if err := a.Pause(); err != nil {
		a.t.Fatal(err)
	}
	got := make([]byte, len(canary()))
	if err := a.ram.mem.ReadAt(got, canaryAddr); err != nil || string(got) != string(canary()) {
		a.t.Errorf("memory that no device was given has changed (%v)", err)
	}
	if err := a.Resume(); err != nil {
		a.t.Fatal(err)
	}
	a.rounds(2)
}

func (a *attacker) status(d target) byte {
	var b [4]byte
	a.bus.slots[d.slot].transport.Read(0x70, b[:])
	return b[0]
}

// A guest breaks each rule of the ring at each device. The device asks for a reset, or fails the request; nothing else happens.
func TestHostileQueues(t *testing.T) {
	a := newAttacker(t, attackedConfig(t))
	for _, c := range []struct {
		name   string
		resets bool
		harm   func(d target)
	}{
		{"a chain that loops", true, func(d target) {
			a.desc(d, 0, uint64(bufsAddr), 16, descNext, 1)
			a.desc(d, 1, uint64(bufsAddr), 16, descNext, 0)
			a.publish(d, 1, 0)
		}},
		{"a descriptor that is its own next", true, func(d target) {
			a.desc(d, 0, uint64(bufsAddr), 16, descNext, 0)
			a.publish(d, 1, 0)
		}},
		{"an index far ahead", true, func(d target) { a.publish(d, ringSize+1, 0) }},
		{"an index that went backwards", true, func(d target) { a.publish(d, 0xffff, 0) }},
		{"a head out of range", true, func(d target) { a.publish(d, 1, ringSize) }},
		{"a next out of range", true, func(d target) {
			a.desc(d, 0, uint64(bufsAddr), 16, descNext, 0xffff)
			a.publish(d, 1, 0)
		}},
		{"readable behind writable", true, func(d target) {
			a.desc(d, 0, uint64(bufsAddr), 16, descWrite|descNext, 1)
			a.desc(d, 1, uint64(bufsAddr), 16, 0, 0)
			a.publish(d, 1, 0)
		}},
		{"an indirect table of one and a half descriptors", true, func(d target) {
			a.desc(d, 0, uint64(bufsAddr), 24, descIndirect, 0)
			a.publish(d, 1, 0)
		}},
		{"the same chain many times", false, func(d target) {
			a.desc(d, 0, uint64(bufsAddr), 64, 0, 0)
			a.publish(d, ringSize, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
		}},
		{"huge lengths to read", false, func(d target) {
			for i := range uint16(ringSize - 1) {
				a.desc(d, int(i), uint64(bufsAddr), 1<<32-1, descNext, i+1)
			}
			a.desc(d, ringSize-1, uint64(bufsAddr), 1<<32-1, 0, 0)
			a.publish(d, 1, 0)
		}},
		{"huge lengths to write", false, func(d target) {
			a.desc(d, 0, uint64(bufsAddr), 16, descNext, 1)
			for i := uint16(1); i < ringSize-1; i++ {
				a.desc(d, int(i), uint64(bufsAddr), 1<<32-1, descWrite|descNext, i+1)
			}
			a.desc(d, ringSize-1, uint64(bufsAddr), 1, descWrite, 0)
			a.publish(d, 1, 0)
		}},
		{"nothing at all", false, func(d target) {
			a.desc(d, 0, 0, 0, 0, 0)
			a.desc(d, 1, 0, 0, descWrite, 0)
			a.publish(d, 2, 0, 1)
		}},
		{"addresses of devices, of no memory, and round the corner", false, func(d target) {
			for i, at := range []uint64{x86.MMIOAddr, x86.LAPICAddr, 128*mib - 8, 1 << 63, ^uint64(0) - 7} {
				a.desc(d, 2*i, at, 64, 0, 0)
				a.desc(d, 2*i+1, at, 64, descWrite, 0)
			}
			a.publish(d, 10, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
		}},
		{"buffers over the rings", false, func(d target) {
			r := ringOf(d.harmed)
			for i, at := range []uint64{r.desc, r.avail, r.used} {
				a.desc(d, 2*i, at, 512, descNext, uint16(2*i+1))
				a.desc(d, 2*i+1, at, 512, descWrite, 0)
			}
			a.publish(d, 3, 0, 2, 4)
		}},
		{"buffers over each other", false, func(d target) {
			for i := range uint16(ringSize - 1) {
				a.desc(d, int(i), uint64(bufsAddr)+uint64(i), 4096, descWrite|descNext, i+1)
			}
			a.desc(d, ringSize-1, uint64(bufsAddr), 4096, descWrite, 0)
			a.publish(d, 1, 0)
		}},
	} {
		for _, d := range targets {
			a.prepare()
			c.harm(d)
			a.run(append(d.initialise(nil), d.notify()))
			if c.resets {
				eventually(t, d.name+" wants a reset after "+c.name, func() bool { return a.status(d)&stNeedsReset != 0 })
			}
			a.healthy()
		}
	}
	a.stillServes()
}

// stillServes has the rng answer a well-behaved driver.
func (a *attacker) stillServes() {
	a.t.Helper()
	d := targets[2]
	a.prepare()
	a.desc(d, 0, uint64(bufsAddr), 64, descWrite, 0)
	a.publish(d, 1, 0)
	a.run(append(d.initialise(nil), d.notify()))
	eventually(a.t, "a request is answered", func() bool {
		return a.peek(a.t, guestmem.Addr(ringOf(0).used))>>16&0xffff == 1 && a.peek(a.t, bufsAddr) != 0
	})
}

// Queues in places where there is no memory: the device never starts, and asks for a reset.
func TestHostileQueueAddresses(t *testing.T) {
	a := newAttacker(t, attackedConfig(t))
	for name, at := range map[string]uint64{
		"in a device's registers":      x86.MMIOAddr,
		"in the interrupt controllers": x86.LAPICAddr,
		"across the end of memory":     128*mib - 16,
		"behind memory":                128 * mib,
		"far away":                     1 << 63,
		"round the corner":             ^uint64(0) - 15,
		"misaligned":                   uint64(bufsAddr) + 1,
	} {
		for part, change := range map[string]func(r *ring){
			"descriptors":    func(r *ring) { r.desc = at },
			"available ring": func(r *ring) { r.avail = at },
			"used ring":      func(r *ring) { r.used = at },
		} {
			for _, d := range targets {
				a.prepare()
				a.publish(d, 1, 0)
				a.run(append(d.initialise(func(_ int, r *ring) { change(r) }), d.notify()))
				if s := a.status(d); s&stNeedsReset == 0 {
					t.Errorf("%s: %s %s: status %#x", d.name, part, name, s)
				}
			}
		}
	}
	a.healthy()
	a.stillServes()
}

// Accesses of every size at every alignment, in the windows, across their borders and behind them.
func TestHostileMMIO(t *testing.T) {
	a := newAttacker(t, attackedConfig(t))
	a.prepare()
	rng := rand.New(rand.NewPCG(3, 4))
	end := uint64(len(targets)) * x86.MMIOSlot
	for range rounds(8) {
		var script []step
		for i := range 400 {
			addr := windowsAddr + rng.Uint64N(end+64)
			switch i % 4 {
			case 0: // the border between two windows
				addr = windowsAddr + rng.Uint64N(5)*x86.MMIOSlot - rng.Uint64N(9)
			case 1: // registers, nearly
				addr = windowsAddr + rng.Uint64N(4)*x86.MMIOSlot + rng.Uint64N(0x120)
			}
			if addr < windowsAddr { // that would be memory, and the page table says which
				addr = windowsAddr
			}
			op := step8 + rng.Uint64N(4)
			if rng.Uint32()%4 == 0 {
				op = stepRead64
			}
			script = append(script, step{op, addr, rng.Uint64() >> rng.Uint32N(64)})
		}
		a.run(script)
		a.healthy()
	}
	a.stillServes()
}

// A guest that does nothing but notify and reset, with requests in flight, keeps its own vCPU busy and nothing else: it can be
// paused at any time, and after that the process is at rest.
func TestNotifyStormAndResets(t *testing.T) {
	a := newAttacker(t, attackedConfig(t))
	goroutines := runtime.NumGoroutine()
	for _, d := range targets {
		a.prepare()
		for i := range uint16(ringSize) {
			a.desc(d, int(i), uint64(bufsAddr)+uint64(i)*8192, 4096, descWrite, 0)
		}
		a.publish(d, ringSize, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
		var storm []step
		for range 20 {
			storm = append(storm, d.initialise(nil)...)
			for q := range uint64(100) {
				storm = append(storm, step{step32, reg(d.slot, 0x50), q % 6})
			}
		}
		a.run(storm)
		a.run(append(storm, step{step32, reg(d.slot, 0x70), 0}))
		a.healthy()
		if got := a.status(d); got != 0 {
			t.Errorf("%s: status %#x after a reset", d.name, got)
		}
		eventually(t, "no goroutine is left over", func() bool { return runtime.NumGoroutine() <= goroutines })
	}
	if err := a.Pause(); err != nil {
		t.Fatal(err)
	}
	begin, used := time.Now(), processCPU(t)
	time.Sleep(200 * time.Millisecond) // at rest: there is nothing to wait for
	if busy := float64(processCPU(t)-used) / float64(time.Since(begin)); busy > 0.5 {
		t.Errorf("the process of a paused guest uses %.0f%% of a processor", 100*busy)
	}
	if err := a.Resume(); err != nil {
		t.Fatal(err)
	}
	a.stillServes()
}

func processCPU(t *testing.T) time.Duration {
	t.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// Whatever address, size and direction: an access to what is not there reads as ones, writes nothing, and harms nobody.
func FuzzMMIO(f *testing.F) {
	f.Add(uint64(x86.MMIOAddr), []byte{0, 0, 0, 0}, false)
	f.Add(uint64(x86.MMIOAddr+x86.MMIOSlot-2), []byte{1, 2, 3, 4, 5, 6, 7, 8}, true)
	f.Add(^uint64(0), []byte{1}, true)
	f.Add(uint64(0), []byte{}, false)
	mem, err := guestmem.New([]guestmem.Region{{GPA: 0, Bytes: make([]byte, 64<<10)}})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, addr uint64, data []byte, write bool) {
		b := bus{slots: []*slot{{transport: mmio.NewTransport(virtio.NewRNG(), mem, func() {})}}}
		data = data[:min(len(data), 8)]
		b.mmio(kvm.MMIO{Addr: addr, Data: data, Write: write})
		if write || addr-x86.MMIOAddr < x86.MMIOSlot {
			return
		}
		for _, v := range data {
			if v != 0xff {
				t.Errorf("a read at %#x is %x", addr, data)
			}
		}
	})
}
