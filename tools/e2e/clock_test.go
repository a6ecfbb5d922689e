package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"testing"
	"time"

	"torpor/tools/rest"
)

// timersCode sleeps in two ways and tells how it went: so long by the monotonic clock, and until a time of the wall clock that passes
// during the pause. Arguments: seconds of each.
const timersCode = `
import ctypes, json, sys, threading, time
libc, said = ctypes.CDLL(None), {}
class Timespec(ctypes.Structure):
    _fields_ = [("sec", ctypes.c_long), ("nsec", ctypes.c_long)]
def note(name, began):
    said[name] = {"monotonic": time.monotonic() - began[0], "realtime": time.time() - began[1]}
def lasting(began):
    time.sleep(float(sys.argv[1]))
    note("lasting", began)
def until(began):
    at = began[1] + float(sys.argv[2])
    libc.clock_nanosleep(0, 1, ctypes.byref(Timespec(int(at), int(at % 1 * 1e9))), None)
    note("until", began)
began = time.monotonic(), time.time()
threads = [threading.Thread(target=f, args=(began,)) for f in (lasting, until)]
for t in threads:
    t.start()
open("/dev/shm/started", "w").close()
for t in threads:
    t.join()
with open("/dev/shm/timers.new", "w") as f:
    json.dump(said, f)
import os
os.rename("/dev/shm/timers.new", "/dev/shm/timers")
`

// week is how long the longest pause seems to last.
const week = 7 * 24 * time.Hour

// However long a sleep was, the wall clock is right at the first request, the monotonic clock goes on from where it stood, timers
// fire by the clock they were set on, and the kernel does not complain.
func TestClock(t *testing.T) {
	w := startWitness(t, newSandbox(t, rest.NewSandbox{}))
	output(t, w.sb, "sudo dmesg --clear")
	lengths := []time.Duration{time.Second}
	if *long {
		lengths = append(lengths, time.Minute)
	}
	for _, asleep := range lengths {
		t.Run(asleep.String(), func(t *testing.T) {
			pause(t, w.sb.SandboxID)
			<-time.After(asleep) // the pause is the subject
			w.sb = wake(t, w.sb.SandboxID)
			checkClock(t, w, 0)
		})
	}
	t.Run("timers", func(t *testing.T) {
		timers := startTimers(t, w.sb)
		pause(t, w.sb.SandboxID)
		paused := time.Since(timers.began)
		<-time.After(timers.due + time.Second - paused) // the wall clock's timer falls into the sleep
		woke := time.Since(timers.began)
		w.sb = wake(t, w.sb.SandboxID)
		checkClock(t, w, 0)
		timers.check(t, w.sb, paused, woke)
	})
	t.Run("a week", func(t *testing.T) {
		if sys.instance == nil {
			t.Skip("moves the host's clock, which only an emulated host allows")
		}
		pause(t, w.sb.SandboxID)
		moveHostClock(t, week)
		w.sb = wake(t, w.sb.SandboxID)
		checkClock(t, w, week)
	})
	t.Run("back again", func(t *testing.T) {
		pause(t, w.sb.SandboxID) // the host's clock is right again: the guest's has to go back
		w.sb = wake(t, w.sb.SandboxID)
		checkClock(t, w, 0)
	})
	if complaints := output(t, w.sb, "sudo dmesg | grep -iE 'soft lockup|rcu.*stall|hung task|unstable' || true"); complaints != "" {
		t.Errorf("the guest's kernel complains:\n%s", complaints)
	}
}

// checkClock asks the witness for the time, which has to be ours plus offset. The monotonic clock is the witness's matter.
func checkClock(t *testing.T, w *witness, offset time.Duration) {
	t.Helper()
	asked, before := time.Now(), w.last
	said := w.check(t)
	answered := time.Now()
	at := time.UnixMicro(int64(said.Realtime * 1e6)).Add(-offset)
	if at.Before(asked.Add(-clockTolerance)) || at.After(answered.Add(clockTolerance)) {
		t.Errorf("the guest's clock says %v between %v and %v (the host's is %v ahead)", at, asked, answered, offset)
	}
	t.Logf("the guest's clock is at %v, our own from %v to %v; it ran %.1f s since the last look", at, asked, answered, said.Monotonic-before.Monotonic)
}

// timers are two in a sandbox: one that lasts so long by the monotonic clock, one that is due so long after its start by the wall clock.
type timers struct {
	began      time.Time
	lasts, due time.Duration
}

func startTimers(t *testing.T, sb rest.Sandbox) timers {
	t.Helper()
	const start = `rm -f /dev/shm/timers /dev/shm/started
setsid -f python3 -c "$1" "$2" "$3" </dev/null >/dev/null 2>&1; until [ -e /dev/shm/started ]; do sleep 0.1; done`
	seconds := func(d time.Duration) string { return strconv.FormatFloat(d.Seconds(), 'f', 3, 64) }
	timers := timers{lasts: limit(1500 * time.Millisecond), due: limit(time.Second)} // longer than it takes to fall asleep
	code, err := sys.Exec(within(t, commandLimit), sb, rest.Command{
		Argv: []string{"bash", "-c", start, "timers", timersCode, seconds(timers.lasts), seconds(timers.due)},
	})
	if err != nil || code != 0 {
		t.Fatalf("starting the timers: code %d, %v", code, err)
	}
	timers.began = time.Now()
	return timers
}

// check demands that the time asleep, from one time after the start to another, did not count for the first, and did for the second.
func (x timers) check(t *testing.T, sb rest.Sandbox, paused, woke time.Duration) {
	t.Helper()
	raw := output(t, sb, "until [ -e /dev/shm/timers ]; do sleep 0.1; done; cat /dev/shm/timers")
	var said struct {
		Lasting, Until struct{ Monotonic, Realtime float64 }
	}
	if err := json.Unmarshal([]byte(raw), &said); err != nil {
		t.Fatalf("the timers said %q", raw)
	}
	t.Logf("%v by the monotonic clock, %v by the wall clock, asleep from %v to %v: %+v", x.lasts, x.due, paused, woke, said)
	late := limit(500 * time.Millisecond).Seconds()
	if m := said.Lasting.Monotonic; m < x.lasts.Seconds() || m > x.lasts.Seconds()+late {
		t.Errorf("a sleep of %v took %.3f s of the monotonic clock", x.lasts, m)
	}
	if m, r := said.Until.Monotonic, said.Until.Realtime; r < x.due.Seconds() || m > r {
		t.Errorf("a timer of the wall clock due in %v fired after %.3f s of it (%.3f s of the monotonic clock)", x.due, r, m)
	}
	if paused > x.lasts || paused > x.due {
		t.Logf("the timers fired before it slept, after %v", paused) // a host that slow says nothing about what a sleep does to them
		return
	}
	if r := said.Lasting.Realtime; r < (x.lasts + woke - paused).Seconds() {
		t.Errorf("a sleep of %v ended %.3f s of wall clock after it began, with a pause from %v to %v between", x.lasts, r, paused, woke)
	}
	if m := said.Until.Monotonic; m >= x.due.Seconds() {
		t.Errorf("a timer of the wall clock due in %v fired after %.3f s of running, with a pause from %v to %v between", x.due, m, paused, woke)
	}
}

// moveHostClock moves the emulated host's clock by whole seconds. The next command on the host sets it right.
func moveHostClock(t *testing.T, by time.Duration) {
	t.Helper()
	t.Cleanup(func() {
		if _, err := sys.shell(context.WithoutCancel(t.Context()), "true"); err != nil {
			t.Error(err)
		}
	})
	// date sets whole seconds, so it is done when one begins.
	hostShell(t, fmt.Sprintf("s=$(date +%%s); while [ $(date +%%s) = $s ]; do :; done; date -s @$((s + 1 + %d))", int(by.Seconds())))
}
