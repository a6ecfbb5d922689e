package machine

import (
	"encoding/binary"
	"testing"

	"torpor/vmm/guestmem"
	"torpor/vmm/x86"
)

// The attacker is a guest that runs at CPL 3, as fast as the host on any KVM, and does what a script says: stores and loads of
// any size at any address. The script and the memory it is about are written from outside, while it idles.
const (
	scriptAddr  = guestmem.Addr(0x2100000) // steps of 24 bytes: operation, address, value
	windowsAddr = 0x3fe00000               // virtual: where the virtio windows, and the rest of their 2 MiB, appear

	stepEnd, step8, step16, step32, step64, stepRead32, stepRead64 = 0, 1, 2, 3, 4, 5, 6
)

var attackerCode = []byte{
	0x48, 0xb8, 0x87, 0, 0, 0xc0, 0, 0, 0, 0, // start: movabs $0xc0000087,%rax
	0x48, 0x89, 4, 0x25, 0xf8, 0xbf, 0, 0, // mov %rax,0xbff8
	0x80, 0x0c, 0x25, 0, 0x90, 0, 0, 4, // orb $0x4,0x9000
	0x80, 0x0c, 0x25, 0, 0xa0, 0, 0, 4, // orb $0x4,0xa000
	0xbf, 0, 0xb0, 0, 0, // mov $0xb000,%edi
	0xb9, 0xff, 1, 0, 0, // mov $0x1ff,%ecx
	0x80, 0x0f, 4, // orb $0x4,(%rdi)
	0x83, 0xc7, 8, // add $0x8,%edi
	0xe2, 0xf8, // loop 2c <start+0x2c>
	0x0f, 0x20, 0xd8, // mov %cr3,%rax
	0x0f, 0x22, 0xd8, // mov %rax,%cr3
	0x0f, 1, 0x15, 0x79, 0, 0, 0, // lgdt 0x79(%rip)
	0xbb, 0, 0, 0, 2, // mov $0x2000000,%ebx
	0xb8, 0, 0, 0x10, 2, // mov $0x2100000,%eax
	0x6a, 0x23, // push $0x23
	0x50,                // push %rax
	0x68, 2, 0x30, 0, 0, // push $0x3002
	0x6a, 0x2b, // push $0x2b
	0x48, 0x8d, 5, 3, 0, 0, 0, // lea 0x3(%rip),%rax
	0x50,       // push %rax
	0x48, 0xcf, // iretq
	0x80, 0x7b, 0x10, 0, // user: cmpb $0x0,0x10(%rbx)
	0x75, 0x4f, // jne b4 <end>
	0xbe, 0, 0, 0x10, 2, // mov $0x2100000,%esi
	0x8b, 6, // next: mov (%rsi),%eax
	0x48, 0x8b, 0x7e, 8, // mov 0x8(%rsi),%rdi
	0x48, 0x8b, 0x56, 0x10, // mov 0x10(%rsi),%rdx
	0x48, 0x83, 0xc6, 0x18, // add $0x18,%rsi
	0x3c, 1, // cmp $0x1,%al
	0x74, 0x1b, // je 97 <w1>
	0x3c, 2, // cmp $0x2,%al
	0x74, 0x1b, // je 9b <w2>
	0x3c, 3, // cmp $0x3,%al
	0x74, 0x1c, // je a0 <w4>
	0x3c, 4, // cmp $0x4,%al
	0x74, 0x1c, // je a4 <w8>
	0x3c, 5, // cmp $0x5,%al
	0x74, 0x1d, // je a9 <r4>
	0x3c, 6, // cmp $0x6,%al
	0x74, 0x1f, // je af <r8>
	0x48, 0xff, 3, // incq (%rbx)
	0xe6, 0x80, // out %al,$0x80
	0xeb, 0xc8, // jmp 5f <user>
	0x88, 0x17, // w1: mov %dl,(%rdi)
	0xeb, 0xcf, // jmp 6a <next>
	0x66, 0x89, 0x17, // w2: mov %dx,(%rdi)
	0xeb, 0xca, // jmp 6a <next>
	0x89, 0x17, // w4: mov %edx,(%rdi)
	0xeb, 0xc6, // jmp 6a <next>
	0x48, 0x89, 0x17, // w8: mov %rdx,(%rdi)
	0xeb, 0xc1, // jmp 6a <next>
	0x8b, 7, // r4: mov (%rdi),%eax
	0x89, 2, // mov %eax,(%rdx)
	0xeb, 0xbb, // jmp 6a <next>
	0x48, 0x8b, 7, // r8: mov (%rdi),%rax
	0xeb, 0xb6, // jmp 6a <next>
	0xb0, 0xfe, // end: mov $0xfe,%al
	0xe6, 0x64, // out %al,$0x64
	0xeb, 0xfa, // jmp b4 <end>
	0x2f, 0, 0xc8, 0, 0, 1, 0, 0, 0, 0, 0x0f, 0x1f, 0x40, 0, // gdtr: .word 47; .quad gdt; .balign 8
	0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, // gdt: .quad 0, 0
	0xff, 0xff, 0, 0, 0, 0x9b, 0xaf, 0, 0xff, 0xff, 0, 0, 0, 0x93, 0xcf, 0, // kernel code and data
	0xff, 0xff, 0, 0, 0, 0xf3, 0xcf, 0, 0xff, 0xff, 0, 0, 0, 0xfb, 0xaf, 0, // user data and code
}

// attacker is that guest.
type attacker struct {
	*Machine
	t *testing.T
}

type step struct{ op, addr, value uint64 }

func newAttacker(t *testing.T, cfg Config) *attacker {
	a := &attacker{Machine: bootCode(t, cfg, attackerCode), t: t}
	a.rounds(2)
	if err := a.Pause(); err != nil {
		t.Fatal(err)
	}
	_ = a.vcpus[0].do(func() error {
		if s, err := a.vcpus[0].kvm.Sregs(); err != nil || s.CS.Selector&3 != 3 {
			t.Errorf("the attacker runs with code selector %#x (%v), not at CPL 3", s.CS.Selector, err)
		}
		return nil
	})
	if err := a.Resume(); err != nil {
		t.Fatal(err)
	}
	return a
}

// rounds waits until the guest has gone through its script from beginning to end.
func (a *attacker) rounds(n uint64) {
	a.t.Helper()
	from := a.peek(a.t, tinyCounter)
	eventually(a.t, "the attacker is through", func() bool { return a.peek(a.t, tinyCounter) > from+n })
}

// run has the guest go through a script, at least once.
func (a *attacker) run(script []step) {
	a.t.Helper()
	var raw []byte
	for _, s := range append(script, step{}) {
		for _, v := range []uint64{s.op, s.addr, s.value} {
			raw = binary.LittleEndian.AppendUint64(raw, v)
		}
	}
	a.poke(a.t, scriptAddr+1, raw[1:]...)
	a.poke(a.t, scriptAddr, raw[0]) // the operation of the first step: from now on there is one
	a.rounds(2)
	a.poke(a.t, scriptAddr, stepEnd)
	a.rounds(2)
}

// reg is the virtual address of a register.
func reg(slot int, off uint64) uint64 { return windowsAddr + uint64(slot)*x86.MMIOSlot + off }
