package e2e

import (
	"flag"
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"torpor/tools/rest"
)

var long = flag.Bool("long", false, "the long forms of tests that have one: see `make soak`")

// The numbers of cycles of the two forms. The short one has each pair of a pause and a wake twice.
const (
	fewCycles  = 12
	manyCycles = 100
)

// cycling is a sandbox that sleeps and wakes again and again.
type cycling struct {
	id     string
	w      *witness
	pauses []way
	wakes  []way
}

// way is one way to put a sandbox to sleep, or to wake it.
type way struct {
	name string
	do   func(t *testing.T)
}

// However it is put to sleep and woken, and however often, a sandbox keeps everything, wakes as fast as at first, and takes no more disk.
func TestCycles(t *testing.T) {
	sb := newSandbox(t, rest.NewSandbox{AutoPause: true, AutoResume: &rest.AutoResume{Enabled: true}})
	c := &cycling{id: sb.SandboxID, w: startWitness(t, sb)}
	c.pauses = []way{{"by request", c.pauseByRequest}, {"by its deadline", c.pauseByDeadline}}
	c.wakes = []way{{"connect", c.wakeByConnect}, {"a command", c.wakeByCommand}, {"a port", c.wakeByPort}}

	rounds := fewCycles
	if *long {
		rounds = manyCycles
	}
	var resumes []time.Duration
	var used []int
	for i := range rounds {
		pause, wake := c.pauses[i%len(c.pauses)], c.wakes[i%len(c.wakes)]
		pause.do(t)
		used = append(used, diskUse(t, c.id))
		wake.do(t)
		c.w.check(t)
		resumes = append(resumes, resumeTime(t, c.id))
		if t.Failed() {
			t.Fatalf("cycle %d of %d, paused %s, woken by %s", i+1, rounds, pause.name, wake.name)
		}
	}
	t.Logf("%d cycles; KiB on disk: %v; resumes: %v", rounds, used, resumes)
	if n := transitions(eventsOf(t, c.id), "paused"); n != rounds {
		t.Errorf("%d pauses in the log, %d made", n, rounds)
	}
	compareEnds(t, rounds, resumes, used)
}

// compareEnds compares the last cycles with the first.
func compareEnds(t *testing.T, rounds int, resumes []time.Duration, used []int) {
	t.Helper()
	const settled = 5 // cycles after which the disk use counts
	if first, last := slices.Max(used[:settled]), slices.Max(used[rounds-settled:]); float64(last) > 1.2*float64(first) {
		t.Errorf("%d KiB on disk after %d cycles, %d after %d", last, rounds, first, settled)
	}
	if !*long {
		return // a fifth of so few is no sample
	}
	fifth := rounds / 5
	first, last := median(resumes[:fifth]), median(resumes[rounds-fifth:])
	t.Logf("resumes of the first fifth %v, of the last %v (medians)", first, last)
	if float64(last) > 1.3*float64(first) {
		t.Errorf("the last %d resumes took %v, the first %v (medians)", fifth, last, first)
	}
}

func (c *cycling) pauseByRequest(t *testing.T) {
	t.Helper()
	pause(t, c.id)
}

func (c *cycling) pauseByDeadline(t *testing.T) {
	t.Helper()
	if err := sys.SetTimeout(within(t, callLimit), c.id, time.Second); err != nil {
		t.Fatalf("timeout: %v", err)
	}
	if _, err := sys.WaitState(within(t, waitLimit), c.id, func(s rest.State) bool { return s.VM.State == "paused" }); err != nil {
		t.Fatal(err)
	}
}

func (c *cycling) wakeByConnect(t *testing.T) {
	t.Helper()
	wake(t, c.id)
}

func (c *cycling) wakeByCommand(t *testing.T) {
	t.Helper()
	if said := output(t, c.w.sb, "echo awake"); said != "awake" {
		t.Errorf("the command that woke it said %q", said)
	}
}

func (c *cycling) wakeByPort(t *testing.T) {
	t.Helper()
	if _, err := c.w.ask(within(t, callLimit)); err != nil {
		t.Errorf("the request that woke it: %v", err)
	}
}

// resumeTime is how long the newest resume took, without the time the request waited for its turn.
func resumeTime(t *testing.T, id string) time.Duration {
	t.Helper()
	for _, e := range slices.Backward(eventsOf(t, id)) {
		if e.Type == "vm" && e.To == "running" && e.PhasesMs["total"] > 0 {
			return time.Duration((e.PhasesMs["total"] - e.PhasesMs["queue"]) * float64(time.Millisecond)).Round(time.Millisecond)
		}
	}
	t.Fatalf("no resume of %s tells how long it took", id)
	return 0
}

// sandboxDir is where the host keeps the files of a sandbox.
func sandboxDir(id string) string { return "/var/lib/torpor/agent/sandboxes/" + id }

// diskUse is what a sandbox takes on the host's disk, in KiB.
func diskUse(t *testing.T, id string) int {
	t.Helper()
	out := hostShell(t, fmt.Sprintf("du -sk %s | cut -f1", sandboxDir(id)))
	kib, err := strconv.Atoi(out)
	if err != nil {
		t.Fatalf("du said %q", out)
	}
	return kib
}

func median(of []time.Duration) time.Duration {
	sorted := slices.Sorted(slices.Values(of))
	return sorted[len(sorted)/2]
}
