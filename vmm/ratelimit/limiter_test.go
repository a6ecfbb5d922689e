package ratelimit_test

import (
	"encoding/binary"
	"errors"
	"math"
	"math/big"
	"math/rand/v2"
	"testing"
	"time"

	"torpor/vmm/ratelimit"
)

// fakeClock stands where it is put.
type fakeClock struct{ now time.Duration }

func (c *fakeClock) Now() time.Duration { return c.now }

func (c *fakeClock) AfterFunc(time.Duration, func()) func() { panic("the limiter sets no timers") }

func newLimiter(t testing.TB, limit ratelimit.Limit, clock ratelimit.Clock) *ratelimit.Limiter {
	t.Helper()
	l, err := ratelimit.New(limit, clock)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestValidate(t *testing.T) {
	good := ratelimit.Bucket{Size: 1, Refill: 1}
	for _, c := range []struct {
		name string
		b    ratelimit.Bucket
		ok   bool
	}{
		{"nothing", ratelimit.Bucket{}, true},
		{"smallest", good, true},
		{"largest", ratelimit.Bucket{Size: ratelimit.MaxTokens, Burst: ratelimit.MaxTokens, Refill: ratelimit.MaxRefill}, true},
		{"no refill time", ratelimit.Bucket{Size: 1}, false},
		{"negative refill time", ratelimit.Bucket{Size: 1, Refill: -1}, false},
		{"refill time too long", ratelimit.Bucket{Size: 1, Refill: ratelimit.MaxRefill + 1}, false},
		{"size too large", ratelimit.Bucket{Size: ratelimit.MaxTokens + 1, Refill: 1}, false},
		{"burst too large", ratelimit.Bucket{Size: 1, Burst: math.MaxUint64, Refill: 1}, false},
		{"burst alone", ratelimit.Bucket{Burst: 1}, false},
		{"refill time alone", ratelimit.Bucket{Refill: 1}, false},
	} {
		for _, limit := range []ratelimit.Limit{{Ops: c.b}, {Bytes: c.b}, {Ops: good, Bytes: c.b}} {
			l, err := ratelimit.New(limit, &fakeClock{})
			if (err == nil) != c.ok || err != nil && !errors.Is(err, ratelimit.ErrLimit) {
				t.Errorf("%s: %v", c.name, err)
			}
			if (l != nil) != (c.ok && !limit.Unlimited()) {
				t.Errorf("%s: limiter %v", c.name, l)
			}
		}
	}
}

func TestUnlimited(t *testing.T) {
	var l *ratelimit.Limiter
	l.Pause()
	l.Resume()
	if l.Take(math.MaxUint64) != 0 || l.Save() != nil || l.Load(nil) != nil {
		t.Error("a nil limiter limits")
	}
}

func TestBucketByHand(t *testing.T) {
	clock := &fakeClock{now: time.Hour}
	l := newLimiter(t, ratelimit.Limit{
		Ops:   ratelimit.Bucket{Size: 10, Refill: time.Second},
		Bytes: ratelimit.Bucket{Size: 1000, Burst: 500, Refill: time.Second},
	}, clock)
	for i, step := range []struct {
		after time.Duration
		n     uint64
		want  time.Duration
	}{
		{0, 500, 0},                            // the burst
		{0, 900, 0},                            // 100 are left
		{0, 200, 100 * time.Millisecond},       // 100 are missing
		{100*time.Millisecond - 1, 200, 1},     // almost
		{1, 200, 0},                            // none are left
		{time.Hour, 5000, 0},                   // full, no burst: a debt of 4000
		{0, 0, 0},                              // an operation without bytes is not held up by it
		{4 * time.Second, 1, time.Millisecond}, // paid off
		{time.Millisecond, 1, 0},               //
		{0, 0, 0},                              // operations: 9 left, and so on
		{0, 2000, time.Second},                 // a large one waits for a full bucket
		{time.Second, math.MaxUint64, 0},       // anything passes a full bucket
		{time.Hour, 1, math.MaxInt64},          // and is paid for, for ages
	} {
		clock.now += step.after
		if got := l.Take(step.n); got != step.want {
			t.Fatalf("step %d: %v, want %v", i, got, step.want)
		}
	}
}

func TestOpsHoldUpBytes(t *testing.T) {
	clock := &fakeClock{}
	l := newLimiter(t, ratelimit.Limit{Ops: ratelimit.Bucket{Size: 2, Refill: time.Second}}, clock)
	for i, want := range []time.Duration{0, 0, time.Second / 2} {
		if got := l.Take(1 << 40); got != want {
			t.Errorf("operation %d: %v, want %v", i, got, want)
		}
	}
}

// model is one bucket in exact fractions.
type model struct {
	ratelimit.Bucket
	level, burst *big.Rat
}

func newModel(b ratelimit.Bucket) *model {
	return &model{b, new(big.Rat).SetUint64(b.Size), new(big.Rat).SetUint64(b.Burst)}
}

func (m *model) fill(d time.Duration) {
	if m.Size == 0 {
		return
	}
	gain := new(big.Rat).Mul(big.NewRat(int64(d), int64(m.Refill)), new(big.Rat).SetUint64(m.Size))
	m.level.Add(m.level, gain)
	if full := new(big.Rat).SetUint64(m.Size); m.level.Cmp(full) > 0 {
		m.level = full
	}
}

func (m *model) may(n uint64) bool {
	need := new(big.Rat).SetUint64(min(n, m.Size))
	return m.Size == 0 || new(big.Rat).Add(m.level, m.burst).Cmp(need) >= 0 || need.Sign() == 0
}

func (m *model) take(n uint64) {
	if m.Size == 0 {
		return
	}
	want := new(big.Rat).SetUint64(n)
	once := want
	if m.burst.Cmp(want) < 0 {
		once = m.burst
	}
	m.level = new(big.Rat).Sub(m.level, new(big.Rat).Sub(want, once))
	m.burst = new(big.Rat).Sub(m.burst, once)
}

func randomBucket(rng *rand.Rand) ratelimit.Bucket {
	if rng.IntN(4) == 0 {
		return ratelimit.Bucket{}
	}
	b := ratelimit.Bucket{Size: 1 + rng.Uint64N(1<<rng.IntN(40)), Refill: 1 + time.Duration(rng.Int64N(1<<rng.IntN(40)))}
	if rng.IntN(2) == 0 {
		b.Burst = rng.Uint64N(2 * b.Size)
	}
	return b
}

// Whatever is asked for and whenever, the limiter does as exact fractions do: what it lets through, what it holds up, and
// that the wait it tells is right to the nanosecond. Pauses cost and gain nothing, nor do saving and loading.
func TestLikeExactFractions(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 1))
		limit := ratelimit.Limit{Ops: randomBucket(rng), Bytes: randomBucket(rng)}
		clock := &fakeClock{now: time.Duration(rng.Int64N(1 << 40))}
		l := newLimiter(t, limit, clock)
		ops, bytes := newModel(limit.Ops), newModel(limit.Bytes)
		largest := max(3*limit.Bytes.Size, 1)
		for step := range 100 {
			d := time.Duration(rng.Int64N(int64(max(limit.Ops.Refill, limit.Bytes.Refill, 1))))
			if rng.IntN(3) > 0 {
				d /= 64
			}
			switch rng.IntN(12) {
			case 0: // time stands still
				l.Pause()
				clock.now += d
				l.Resume()
			case 1: // into another process, later
				if l == nil {
					break
				}
				state := l.Save()
				clock = &fakeClock{now: time.Duration(rng.Int64N(1 << 40))}
				l = newLimiter(t, limit, clock)
				if err := l.Load(state); err != nil {
					t.Fatal(err)
				}
				ops.clamp()
				bytes.clamp()
			default:
				clock.now += d
				ops.fill(d)
				bytes.fill(d)
			}
			n := rng.Uint64N(largest)
			want := ops.may(1) && bytes.may(n)
			wait := l.Take(n)
			if (wait == 0) != want {
				t.Fatalf("seed %d, step %d: %d bytes wait %v, fractions say %v", seed, step, n, wait, want)
			}
			if !want {
				// A nanosecond earlier is too early, then is not.
				clock.now += wait - 1
				ops.fill(wait - 1)
				bytes.fill(wait - 1)
				if again := l.Take(n); again != 1 {
					t.Fatalf("seed %d, step %d: a nanosecond early, still %v to wait", seed, step, again)
				}
				clock.now++
				ops.fill(1)
				bytes.fill(1)
				if again := l.Take(n); again != 0 || !ops.may(1) || !bytes.may(n) {
					t.Fatalf("seed %d, step %d: waited as told, still %v to wait", seed, step, again)
				}
			}
			ops.take(1)
			bytes.take(n)
		}
	}
}

// clamp is what loading does to a debt.
func (m *model) clamp() {
	if least := new(big.Rat).Neg(new(big.Rat).SetUint64(m.Size)); m.level.Cmp(least) < 0 {
		m.level = least
	}
}

// In any stretch of time no more passes than a full bucket, the burst, the rate, and one operation that began it all.
func TestRateHolds(t *testing.T) {
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 2))
		b := ratelimit.Bucket{Size: 1 + rng.Uint64N(1<<20), Refill: 1 + time.Duration(rng.Int64N(1e9))}
		b.Burst = rng.Uint64N(b.Size)
		clock := &fakeClock{}
		l := newLimiter(t, ratelimit.Limit{Bytes: b}, clock)
		type event struct {
			at time.Duration
			n  uint64
		}
		var passed []event
		largest := 2 * b.Size
		for range 200 { // greedy: as soon as it may
			n := rng.Uint64N(largest)
			for wait := l.Take(n); wait > 0; wait = l.Take(n) {
				clock.now += wait
			}
			passed = append(passed, event{clock.now, n})
		}
		for i := range passed {
			var sum float64
			for _, e := range passed[i:] {
				sum += float64(e.n)
				most := float64(b.Size+b.Burst+largest) + float64(e.at-passed[i].at)*float64(b.Size)/float64(b.Refill)
				if sum > most+1 {
					t.Fatalf("seed %d: %f bytes in %v, at most %f may pass", seed, sum, e.at-passed[i].at, most)
				}
			}
		}
	}
}

func TestLoadFitsTheLimitThereIs(t *testing.T) {
	old := newLimiter(t, ratelimit.Limit{Bytes: ratelimit.Bucket{Size: 1000, Burst: 500, Refill: time.Second}}, &fakeClock{})
	full := old.Save()
	old.Take(math.MaxUint64)
	indebted := old.Save()
	small := ratelimit.Limit{Bytes: ratelimit.Bucket{Size: 10, Burst: 5, Refill: 10 * time.Second}}

	l := newLimiter(t, small, &fakeClock{})
	if err := l.Load(full); err != nil || l.Take(15) != 0 || l.Take(1) != time.Second {
		t.Errorf("a full bucket became another one: %v", err)
	}
	l = newLimiter(t, small, &fakeClock{})
	if err := l.Load(indebted); err != nil || l.Take(1) != 11*time.Second {
		t.Errorf("a debt is %v, %v", l.Take(1), err)
	}
	if err := newLimiter(t, ratelimit.Limit{}, &fakeClock{}).Load(full); err != nil {
		t.Errorf("without a limit: %v", err)
	}
}

func TestLoadRefuses(t *testing.T) {
	limit := ratelimit.Limit{Ops: ratelimit.Bucket{Size: 1, Refill: 1}}
	good := newLimiter(t, limit, &fakeClock{}).Save()
	for name, state := range map[string][]byte{
		"cut short":     good[:len(good)-1],
		"too long":      append(good[:len(good):len(good)], 0),
		"other version": append([]byte{9}, good[1:]...),
	} {
		for _, l := range []*ratelimit.Limiter{nil, newLimiter(t, limit, &fakeClock{})} {
			if err := l.Load(state); !errors.Is(err, ratelimit.ErrLimit) {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

func TestAfter(t *testing.T) {
	l := newLimiter(t, ratelimit.Limit{Ops: ratelimit.Bucket{Size: 1, Refill: time.Millisecond}}, ratelimit.System())
	for l.Take(0) == 0 {
	}
	over := make(chan struct{})
	l.After(l.Take(0), func() { close(over) })
	never := l.After(time.Hour, func() { t.Error("a cancelled timer ran out") })
	never()
	<-over
}

// FuzzLoad takes any bytes for a state: refused, or the limiter still works within its limits.
func FuzzLoad(f *testing.F) {
	limit := ratelimit.Limit{Ops: ratelimit.Bucket{Size: 10, Burst: 3, Refill: time.Second}, Bytes: ratelimit.Bucket{Size: 1 << 20, Refill: time.Second}}
	good := newLimiter(f, limit, &fakeClock{}).Save()
	f.Add(good)
	f.Add([]byte{})
	wild := append([]byte{}, good...)
	for i := 8; i < len(wild); i += 8 {
		binary.LittleEndian.PutUint64(wild[i:], 1<<63)
	}
	f.Add(wild)
	f.Fuzz(func(t *testing.T, state []byte) {
		clock := &fakeClock{}
		l := newLimiter(t, limit, clock)
		if l.Load(state) != nil {
			return
		}
		passed := 0
		for range 20 {
			if l.Take(1<<20) == 0 {
				passed++
			}
		}
		if passed > 1 {
			t.Fatalf("%d MiB passed at once", passed)
		}
		clock.now += 3 * time.Second // a debt of one size, and a full bucket
		if wait := l.Take(1 << 20); wait != 0 {
			t.Fatalf("still %v to wait", wait)
		}
	})
}
