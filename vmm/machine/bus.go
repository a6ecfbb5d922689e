package machine

import (
	"torpor/vmm/kvm"
	"torpor/vmm/legacy"
	"torpor/vmm/virtio/mmio"
	"torpor/vmm/x86"
)

// bus routes the accesses of vCPUs that have no RAM behind them. It is immutable while vCPUs run.
type bus struct {
	ports *legacy.Ports
	slots []*slot
}

// words are the registers that drivers come back to at every interrupt, for vCPUs to answer on the spot.
func (b *bus) words() []kvm.Word {
	var words []kvm.Word
	for i, s := range b.slots {
		window := x86.MMIOAddr + uint64(i)*x86.MMIOSlot
		words = append(words, kvm.Word{
			ReadAddr: window + mmio.StatusOffset, ClearAddr: window + mmio.AckOffset, Value: s.transport.InterruptStatus(),
		})
	}
	return words
}

// mmio serves one access. What is not there reads as all ones and takes writes in silence.
func (b *bus) mmio(m kvm.MMIO) {
	if m.Addr >= x86.MMIOAddr {
		if i := (m.Addr - x86.MMIOAddr) / x86.MMIOSlot; i < uint64(len(b.slots)) {
			off := (m.Addr - x86.MMIOAddr) % x86.MMIOSlot
			if m.Write {
				b.slots[i].transport.Write(off, m.Data)
			} else {
				b.slots[i].transport.Read(off, m.Data)
			}
			return
		}
	}
	if !m.Write {
		for i := range m.Data {
			m.Data[i] = 0xff
		}
	}
}
