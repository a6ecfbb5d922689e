package e2e

import (
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"torpor/tools/rest"
)

// Sandboxes put to sleep at once and woken at once: every one answers, as itself, and what they have of their template in memory they
// have together.
func TestManyWakeAtOnce(t *testing.T) {
	many := 8
	if *long {
		many = 16
	}
	const keep = `setsid -f bash -c 'n=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d " \n"); mkfifo /tmp/ask; while :; do echo $n > /tmp/ask; sleep 0.1; done' </dev/null >/dev/null 2>&1
until [ -p /tmp/ask ]; do sleep 0.1; done; cat /tmp/ask`
	crowd := make([]rest.Sandbox, many)
	nonces := map[string]int{}
	for i := range crowd {
		crowd[i] = newSandbox(t, rest.NewSandbox{AutoPause: true, AutoResume: &rest.AutoResume{Enabled: true}})
		nonces[firstWord(output(t, crowd[i], keep))] = i
	}
	if len(nonces) != many {
		t.Fatalf("%d nonces of %d sandboxes", len(nonces), many)
	}
	// The connections that these leave open the wakes use: QEMU drops some of many that are made at the same moment.
	atOnce(t, "pause", crowd, 100*time.Millisecond, func(sb rest.Sandbox) (string, error) {
		return "", sys.Pause(within(t, callLimit), sb.SandboxID)
	})
	said := atOnce(t, "wake", crowd, 0, func(sb rest.Sandbox) (string, error) {
		return sys.Output(within(t, callLimit), sb, "cat /tmp/ask")
	})
	for i, nonce := range said {
		if owner, ok := nonces[firstWord(nonce)]; !ok || owner != i {
			t.Errorf("sandbox %d said %q", i, nonce)
		}
		if s := state(t, crowd[i].SandboxID); s.Public != "running" {
			t.Errorf("sandbox %d is %s: vm %s, envd %s", i, s.Public, s.VM.State, s.Envd.State)
		}
	}
	checkShared(t, many)
}

// firstWord is what the keeper of a nonce says, who may say it more than once to one who listens long.
func firstWord(said string) string {
	word, _, _ := strings.Cut(strings.TrimSpace(said), "\n")
	return word
}

// atOnce does something with every one of a crowd at the same moment, or so far apart, reports the slowest, and returns what each said.
func atOnce(t *testing.T, what string, crowd []rest.Sandbox, apart time.Duration, do func(rest.Sandbox) (string, error)) []string {
	t.Helper()
	said, failed, took := make([]string, len(crowd)), make([]error, len(crowd)), make([]time.Duration, len(crowd))
	var all sync.WaitGroup
	began := time.Now()
	for i, sb := range crowd {
		all.Go(func() {
			<-time.After(time.Duration(i) * apart)
			said[i], failed[i] = do(sb)
			took[i] = time.Since(began)
		})
	}
	all.Wait()
	slowest := time.Duration(0)
	for i, err := range failed {
		if err != nil {
			t.Errorf("%s of sandbox %d: %v", what, i, err)
		}
		slowest = max(slowest, took[i])
	}
	t.Logf("%s of %d at once: median %v, slowest %v", what, len(crowd), median(took).Round(time.Millisecond), slowest.Round(time.Millisecond))
	return said
}

// checkShared demands that the pages of the template that VMMs have mapped are the same pages of the host's memory.
func checkShared(t *testing.T, many int) {
	t.Helper()
	// A page that one alone has mapped is counted whole, one of n by an nth. Written pages are everybody's own and left out.
	out := hostShell(t, `for p in $(pidof torpor-vmm); do cat /proc/$p/smaps; done | awk '
/^[0-9a-f]+-[0-9a-f]+ / { base = index($0, "/templates/") > 0 }
base && /^Shared_Clean:/ { shared += $2 }
base && /^Private_Clean:/ { private += $2 }
END { print shared + 0, private + 0 }'`)
	shared, private, _ := strings.Cut(out, " ")
	s, err := strconv.Atoi(shared)
	p, err2 := strconv.Atoi(private)
	if err != nil || err2 != nil {
		t.Fatalf("awk said %q", out)
	}
	t.Logf("%d VMMs have %d KiB of the template mapped that others have too, and %d KiB that nobody else has", many, s, p)
	if s == 0 || p > s/4 {
		t.Error("the template's pages are not shared")
	}
}
