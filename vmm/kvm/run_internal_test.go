package kvm

import (
	"encoding/binary"
	"sync/atomic"
	"testing"
)

// An access to one of the words is answered, and nothing else is.
func TestWordsAreAnswered(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector's atomic operations cannot be used where exits are answered")
	}
	const read, clear = 0xc0000060, 0xc0001064
	var word atomic.Uint32
	for _, c := range []struct {
		name          string
		reason        ExitReason
		addr          uint64
		write         bool
		n             uint32
		data          uint32
		answered      bool
		data2, value2 uint32
	}{
		{"a read", ExitMMIO, read, false, 4, 99, true, 3, 3},
		{"a write", ExitMMIO, clear, true, 4, 1, true, 1, 2},
		{"a write of bits that are not set", ExitMMIO, clear, true, 4, 0xfffffff0, true, 0xfffffff0, 3},
		{"a write where it is read", ExitMMIO, read, true, 4, 1, false, 1, 3},
		{"a read where it is written", ExitMMIO, clear, false, 4, 99, false, 99, 3},
		{"a read of two bytes", ExitMMIO, read, false, 2, 99, false, 99, 3},
		{"a read beside it", ExitMMIO, read + 4, false, 4, 99, false, 99, 3},
		{"no memory access", ExitIO, read, false, 4, 99, false, 99, 3},
	} {
		word.Store(3)
		v := &VCPU{page: make([]byte, minRunBytes)}
		v.SetWords([]Word{{ReadAddr: 1, ClearAddr: 2, Value: new(atomic.Uint32)}, {ReadAddr: read, ClearAddr: clear, Value: &word}})
		le := binary.LittleEndian
		le.PutUint32(v.page[runExitReason:], uint32(c.reason))
		le.PutUint64(v.page[runMMIOAddr:], c.addr)
		le.PutUint32(v.page[runMMIOLen:], c.n)
		le.PutUint32(v.page[runMMIOData:], c.data)
		if c.write {
			v.page[runMMIOIsWrite] = 1
		}
		if got := v.answer(); got != c.answered || v.Answered() != map[bool]uint64{true: 1}[c.answered] {
			t.Errorf("%s: answered %v, %d times", c.name, got, v.Answered())
		}
		if data := le.Uint32(v.page[runMMIOData:]); data != c.data2 || word.Load() != c.value2 {
			t.Errorf("%s: the guest has %#x, the word is %#x; want %#x and %#x", c.name, data, word.Load(), c.data2, c.value2)
		}
	}
}
