package sandbox

import (
	"context"
	"strings"
	"testing"
	"time"

	"torpor/agent/timing"
	"torpor/api/apierr"
)

// A VMM that dies before envd has answered ends the start at once, and not when envd's time is up; the next start finds everything.
func TestAVMMThatDiesBeforeEnvdAnswersIsNotWaitedFor(t *testing.T) {
	r := newRig(t, func(b *timing.Budgets) { b.Handshake = time.Hour })
	s := r.create("i1")
	r.pause(s)
	r.w.setHook(func(ctx context.Context, op, name string) error {
		if op != "handshake" {
			return nil
		}
		r.w.die(name)
		<-ctx.Done() // as a guest that is not there
		return context.Cause(ctx)
	})
	_, _, err := s.Resume(r.ctx(), 0)
	wantCode(t, err, apierr.NotReady)
	if !strings.Contains(err.Error(), "the VMM ended") {
		t.Errorf("%v", err)
	}
	r.w.setHook(nil)
	r.resume(s)
}
