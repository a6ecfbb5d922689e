package sandbox

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"torpor/api/apierr"
)

// chaos fails and delays operations at random.
type chaos struct {
	mu   sync.Mutex
	rnd  *rand.Rand
	rate float64
}

func (c *chaos) roll() float64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.rnd.Float64()
}

func (c *chaos) hook(ctx context.Context, op, _ string) error {
	if op == "kill" {
		return nil
	}
	if c.roll() < 0.3 {
		select {
		case <-time.After(time.Duration(c.roll() * float64(2*time.Millisecond))):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if c.roll() < c.rate {
		return errors.New("chaos: " + op)
	}
	return nil
}

// observer checks what must hold of every view that anybody can see.
type observer struct {
	t    *testing.T
	w    *world
	mu   sync.Mutex
	last map[string]View
}

func (o *observer) see(c Change) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if c.Removed {
		return nil
	}
	v := c.View
	if old, ok := o.last[v.ID]; ok {
		if v.Incarnation < old.Incarnation || v.Generation < old.Generation && v.RemovedAt.IsZero() {
			o.t.Errorf("%s went back from incarnation %d generation %d to %d and %d", v.ID, old.Incarnation, old.Generation, v.Incarnation, v.Generation)
		}
	}
	if v.VM() == Running && (v.Envd.Incarnation != v.Incarnation || v.Envd.State == Absent || v.Envd.State == Starting) {
		o.t.Errorf("%s is running without a handshake of incarnation %d: %+v", v.ID, v.Incarnation, v.Envd)
	}
	if (v.VM() == Paused || v.VM() == Stopped || v.VM() == Failed) && v.Envd.State != Absent {
		o.t.Errorf("%s is %s with envd %s", v.ID, v.State, v.Envd.State)
	}
	o.last[v.ID] = v
	return nil
}

// Random commands by many callers, with random failures underneath, never break what must hold. The world itself checks that
// no sandbox ever has two VMMs.
func TestRandomCommandsKeepTheInvariants(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { randomCommands(t, seed) })
	}
}

func randomCommands(t *testing.T, seed uint64) {
	r := newRig(t)
	c := &chaos{rnd: rand.New(rand.NewPCG(seed, 1)), rate: 0.05}
	r.w.setHook(c.hook)
	o := &observer{t: t, w: r.w, last: map[string]View{}}
	watching, stop := context.WithCancel(r.ctx())
	watched := make(chan struct{})
	go func() { defer close(watched); r.m.Watch(watching, "", o.see) }()

	var wg sync.WaitGroup
	for worker := range 6 {
		rnd := rand.New(rand.NewPCG(seed, uint64(worker)+100))
		wg.Go(func() {
			for i := range 40 {
				command(r, rnd, fmt.Sprintf("i%dx%d", rnd.IntN(3), i/10))
			}
		})
	}
	wg.Wait()
	r.w.setHook(nil)
	settleAll(r)
	stop()
	<-watched
}

// command does one random thing to a sandbox.
func command(r *rig, rnd *rand.Rand, id string) {
	ctx, cancel := context.WithTimeout(r.ctx(), 5*time.Second)
	defer cancel()
	s := r.m.find(id)
	if s == nil {
		r.m.Create(ctx, request(id))
		return
	}
	switch rnd.IntN(12) {
	case 0, 1, 2:
		s.Pause(ctx)
	case 3, 4, 5:
		if v, _, err := s.Resume(ctx, time.Minute); err == nil && v.Incarnation == 0 {
			r.t.Error("resume answered nonsense")
		}
	case 6, 7, 8:
		if l, err := r.m.Acquire(ctx, id, allow); err == nil {
			if conn, err := l.Dial(ctx, 80); err == nil {
				conn.Close()
			}
			l.Release()
		}
	case 9:
		s.SetDeadline(now().Add(time.Duration(rnd.IntN(5))*time.Millisecond), false)
	case 10:
		r.w.die(id)
	case 11:
		if rnd.IntN(3) == 0 {
			if err := r.m.Kill(ctx, id); err != nil {
				r.t.Errorf("kill: %v", err)
			}
		} else {
			r.w.loseContact(id)
		}
	}
}

// settleAll requires that every sandbox that is left can be brought to an end state without help: a resume works or says why
// not, and a kill always works.
func settleAll(r *rig) {
	for _, v := range r.m.List() {
		s, err := r.m.Get(v.ID)
		if err != nil {
			continue
		}
		if v, _, err := s.Resume(r.ctx(), time.Hour); err == nil && !v.Usable() && s.View().VM() == Resuming {
			r.t.Errorf("%s: resume answered with %s", v.ID, v.State)
		} else if err != nil && !isCode(err, apierr.SandboxBroken) && !isCode(err, apierr.NotFound) && !isCode(err, apierr.Deleting) {
			r.t.Errorf("%s does not come back: %v", v.ID, err)
		}
		if err := s.Kill(r.ctx(), "the end"); err != nil {
			r.t.Errorf("%s cannot be killed: %v", v.ID, err)
		}
		r.gone(v.ID)
	}
}
