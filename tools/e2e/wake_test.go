package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"testing"
	"time"

	"torpor/tools/rest"
)

const cycles = 20

// What the public API calls running must serve: a poller believes it at every instant of 20 pauses and wakes.
func TestRunningMeansServing(t *testing.T) {
	var p *poller
	var end struct{ Failures []string }
	script(t, sdkNew, cyclesLimit, func(line json.RawMessage) {
		var hello struct{ SandboxID string }
		decode(t, line, &hello)
		if hello.SandboxID != "" {
			cleanUp(t, hello.SandboxID)
			p = startPoller(t, hello.SandboxID)
			return
		}
		decode(t, line, &end)
	}, "cycles.mjs", strconv.Itoa(cycles))
	p.stop()
	for _, f := range end.Failures {
		t.Errorf("first command after connect %s", f)
	}
	for _, f := range p.failures {
		t.Errorf("poller: %s", f)
	}
	t.Logf("the poller looked %d times and called %d times; slowest call %v", p.looks, p.calls, p.slowest)
	if p.calls < cycles {
		t.Errorf("the poller made %d calls in %d cycles: it has not tested anything", p.calls, cycles)
	}
	if n := transitions(eventsOf(t, p.id), "paused"); n < cycles {
		t.Errorf("%d pauses in the log, %d asked for", n, cycles)
	}
}

// poller reads the public state without rest and, whenever it says running, sends a data-plane call with a short deadline.
type poller struct {
	id           string
	cancel       context.CancelFunc
	done         chan struct{}
	looks, calls int
	slowest      time.Duration
	failures     []string
}

func startPoller(t *testing.T, id string) *poller {
	t.Helper()
	detail, err := sys.Get(within(t, callLimit), id)
	if err != nil {
		t.Fatalf("get: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	p := &poller{id: id, cancel: cancel, done: make(chan struct{})}
	go p.run(ctx, detail.Sandbox)
	return p
}

func (p *poller) stop() {
	p.cancel()
	<-p.done
}

func (p *poller) run(ctx context.Context, sb rest.Sandbox) {
	defer close(p.done)
	for ctx.Err() == nil {
		seen, err := sys.Get(ctx, p.id)
		p.looks++
		if err == nil && seen.State == "running" {
			p.calls++
			began := time.Now()
			err = p.call(ctx, sb)
			p.slowest = max(p.slowest, time.Since(began))
		}
		if err != nil && ctx.Err() == nil {
			p.failures = append(p.failures, fmt.Sprintf("look %d at %s: %v", p.looks, time.Now().Format(time.StampMilli), err))
		}
	}
}

func (p *poller) call(ctx context.Context, sb rest.Sandbox) error {
	ctx, cancel := context.WithTimeout(ctx, limit(pollerLimit))
	defer cancel()
	_, err := sys.Processes(ctx, sb)
	return err
}

// Any number of requests for a sleeping sandbox make one wake, and every one of them is answered.
func TestHerdWakesOnce(t *testing.T) {
	var id string
	answers := 0
	script(t, sdkNew, scriptLimit, func(line json.RawMessage) {
		var said struct {
			SandboxID string
			Answers   int
		}
		decode(t, line, &said)
		if said.SandboxID != "" {
			id = said.SandboxID
			cleanUp(t, id)
		}
		answers += said.Answers
	}, "herd.mjs")
	if answers != 8 {
		t.Errorf("%d answers to 8 clients", answers)
	}
	if n := transitions(afterLast(eventsOf(t, id), "paused"), "resuming"); n != 1 {
		t.Errorf("%d resumes in the log for one herd", n)
	}
}

// Nobody without the token may wake a sandbox, or learn that it exists.
func TestStrangersDoNotWake(t *testing.T) {
	sb := newSandbox(t, rest.NewSandbox{AutoPause: true, AutoResume: &rest.AutoResume{Enabled: true}})
	pause(t, sb.SandboxID)
	before := state(t, sb.SandboxID)
	stranger := rest.Sandbox{SandboxID: sb.SandboxID, AccessToken: "wrong"}
	nobody := rest.Sandbox{SandboxID: "i00000000000000000000", AccessToken: "wrong"}
	status, body := knock(t, stranger)
	wantStatus, wantBody := knock(t, nobody)
	if status != wantStatus || mask(body, stranger.SandboxID) != mask(wantBody, nobody.SandboxID) {
		t.Errorf("a stranger is answered %d %s, for a sandbox that does not exist %d %s", status, body, wantStatus, wantBody)
	}
	if status != http.StatusBadGateway {
		t.Errorf("answered %d", status)
	}
	after := state(t, sb.SandboxID)
	if after.VM.State != "paused" || after.Incarnation != before.Incarnation || !after.EndAt.Equal(before.EndAt) {
		t.Errorf("a stranger changed it from %+v to %+v", before, after)
	}
}
