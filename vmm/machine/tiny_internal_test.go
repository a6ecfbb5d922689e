package machine

import (
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"torpor/vmm/guestmem"
	"torpor/vmm/kvm"
)

// The tiny guest is a few dozen bytes of 64-bit code in an ELF file, entered as a kernel would be. It needs no operating
// system and works on any KVM, however slow its supervisor mode.
const (
	tinyEntry   = 0x1000000
	tinyCounter = guestmem.Addr(0x2000000) // u64, counts for ever
	tinyMagic   = tinyCounter + 8          // u64, what the first virtio window's first register reads as
	tinyCommand = tinyCounter + 16         // u8: how to end

	tinyReset, tinyPowerOff, tinyFault = 1, 2, 3
)

var tinyCode = []byte{
	0x48, 0xb8, 0x83, 0, 0, 0xc0, 0, 0, 0, 0, //   mov rax, 0xc0000083   ; a 2 MiB page at the MMIO hole
	0x48, 0x89, 0x04, 0x25, 0xf8, 0xbf, 0, 0, //   mov [0xbff8], rax     ; last entry of the boot page directory
	0x48, 0xc7, 0xc3, 0, 0, 0, 0x02, //            mov rbx, tinyCounter
	0x8b, 0x04, 0x25, 0, 0, 0xe0, 0x3f, //         mov eax, [0x3fe00000] ; virtio slot 0, MagicValue
	0x48, 0x89, 0x43, 0x08, //                     mov [rbx+8], rax
	0x48, 0xff, 0x03, //                     loop: inc qword [rbx]
	0xe6, 0x80, //                                 out 0x80, al          ; an exit each time round
	0x80, 0x7b, 0x10, 0, //                        cmp byte [rbx+16], 0
	0x74, 0xf5, //                                 je loop
	0x8a, 0x43, 0x10, //                           mov al, [rbx+16]
	0x3c, tinyReset, 0x75, 4, //                   cmp al, 1; jne +4
	0xb0, 0xfe, 0xe6, 0x64, //                     mov al, 0xfe; out 0x64, al
	0x3c, tinyPowerOff, 0x75, 8, //                cmp al, 2; jne +8
	0x66, 0xba, 0x00, 0x06, //                     mov dx, 0x600
	0xb0, 0x34, 0xee, //                           mov al, 5<<2|1<<5; out dx, al
	0xf4,       //                                 hlt
	0x0f, 0x0b, //                                 ud2                   ; without an IDT: a triple fault
}

// kernelOf writes the ELF file of a guest that consists of code.
func kernelOf(t *testing.T, code []byte) string {
	t.Helper()
	le := binary.LittleEndian
	b := make([]byte, 0x1000, 0x1000+len(code))
	copy(b, "\x7fELF\x02\x01\x01")
	le.PutUint16(b[16:], 2)  // executable
	le.PutUint16(b[18:], 62) // x86-64
	le.PutUint64(b[24:], tinyEntry)
	le.PutUint64(b[32:], 64) // program headers
	le.PutUint16(b[54:], 56)
	le.PutUint16(b[56:], 1)
	ph := b[64:]
	le.PutUint32(ph, 1) // PT_LOAD
	le.PutUint64(ph[8:], 0x1000)
	le.PutUint64(ph[24:], tinyEntry)
	le.PutUint64(ph[32:], uint64(len(code)))
	le.PutUint64(ph[40:], uint64(len(code)))
	path := filepath.Join(t.TempDir(), "tiny")
	if err := os.WriteFile(path, append(b, code...), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// needKVM skips the test, with a reason, where there is no KVM. TORPOR_REQUIRE_KVM turns the skip into a failure.
func needKVM(t *testing.T) {
	t.Helper()
	sys, err := kvm.Open()
	if err == nil {
		_ = sys.Close()
		return
	}
	if os.Getenv("TORPOR_REQUIRE_KVM") == "" && (errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission)) {
		t.Skipf("needs /dev/kvm: %v", err)
	}
	t.Fatal(err)
}

// patience is how long a test waits for a guest before it gives up: emulated hosts are slow, a hung guest is a bug.
const patience = 60 * time.Second

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("gave up waiting until %s", what)
		}
	}
}

func testConfig(vcpus int, memory uint64) Config {
	return Config{Host: testHost(), VCPUs: vcpus, MemoryBytes: memory, Console: &Console{}}
}

func bootTiny(t *testing.T, cfg Config) *Machine { return bootCode(t, cfg, tinyCode) }

// bootCode starts a guest that consists of code.
func bootCode(t *testing.T, cfg Config, code []byte) *Machine {
	t.Helper()
	needKVM(t)
	m, err := Boot(cfg, Kernel{Image: openFile(t, kernelOf(t, code), os.O_RDONLY)}, zerolog.New(zerolog.NewTestWriter(t)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeMachine(t, m) })
	return m
}

func restoreTiny(t *testing.T, cfg Config, from savedFiles) *Machine {
	t.Helper()
	m, _, err := Restore(cfg, from.open(t), true, zerolog.New(zerolog.NewTestWriter(t)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeMachine(t, m) })
	return m
}

func closeMachine(t *testing.T, m *Machine) {
	t.Helper()
	if err := m.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
}

func (m *Machine) peek(t *testing.T, a guestmem.Addr) uint64 {
	t.Helper()
	v, err := m.ram.mem.ReadUint64(a)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func (m *Machine) poke(t *testing.T, a guestmem.Addr, b ...byte) {
	t.Helper()
	if err := m.ram.mem.WriteAt(b, a); err != nil {
		t.Fatal(err)
	}
}

// counts waits until the guest has counted on from n.
func counts(t *testing.T, m *Machine, n uint64) {
	t.Helper()
	eventually(t, "the guest counts", func() bool { return m.peek(t, tinyCounter) > n+10 })
}
