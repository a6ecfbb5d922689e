package ratelimit

import (
	"encoding/binary"
	"fmt"
)

// stateVersion is the version of a saved limiter: u32 version, u32 zero, then for ops and bytes: i64 level, u64 burst that is
// left, u64 part of the next token in units of 1/refill, u64 refill time in ns; all little-endian.
const (
	stateVersion = 1
	bucketBytes  = 32
	stateBytes   = 8 + 2*bucketBytes
)

// Save returns the tokens as they are now, for a snapshot; nothing for a nil Limiter.
func (l *Limiter) Save() []byte {
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.countLocked()
	b := binary.LittleEndian.AppendUint32(make([]byte, 0, stateBytes), stateVersion)
	b = binary.LittleEndian.AppendUint32(b, 0)
	return l.bytes.append(l.ops.append(b))
}

// Load puts the tokens to what Save returned; nothing leaves them as they are. Limits are the host's to choose and may have
// changed since: the tokens are fitted to the limits there are now, and a debt is at most one bucket's size.
func (l *Limiter) Load(state []byte) error {
	if len(state) == 0 {
		return nil
	}
	if len(state) != stateBytes {
		return fmt.Errorf("%w: its state has %d bytes, not %d", ErrLimit, len(state), stateBytes)
	}
	if v, zero := binary.LittleEndian.Uint32(state), binary.LittleEndian.Uint32(state[4:]); v != stateVersion || zero != 0 {
		return fmt.Errorf("%w: its state is of version %d.%d, this program reads %d", ErrLimit, v, zero, stateVersion)
	}
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ops.load(state[8:])
	l.bytes.load(state[8+bucketBytes:])
	l.last = l.clock.Now()
	return nil
}

func (b *bucket) append(out []byte) []byte {
	for _, v := range []uint64{uint64(b.level), b.burst, b.part, uint64(b.Refill)} {
		out = binary.LittleEndian.AppendUint64(out, v)
	}
	return out
}

// load takes the level and what is left of the burst, and of the next token if it fills as fast as it did.
func (b *bucket) load(in []byte) {
	le, size := binary.LittleEndian, int64(b.Size)
	level := int64(le.Uint64(in))
	b.level = max(min(level, size), -size)
	b.burst = min(le.Uint64(in[8:]), b.Burst)
	b.part = 0
	if part := le.Uint64(in[16:]); level == b.level && level < size && le.Uint64(in[24:]) == uint64(b.Refill) && part < uint64(b.Refill) {
		b.part = part
	}
}
