package e2e

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"torpor/tools/rest"
)

// A pause costs what was touched, not what the machine has.
func TestSnapshotCostsWhatWasTouched(t *testing.T) {
	const touchedMiB, mostMiB = 20, 60
	sb := newSandbox(t, rest.NewSandbox{})
	if got := state(t, sb.SandboxID).Memory.GuestBytes; got != 512<<20 {
		t.Errorf("the sandbox has %d MiB, the promise is about 512", got>>20)
	}
	before := keepMemory(t, sb, touchedMiB)
	pause(t, sb.SandboxID)
	stored := state(t, sb.SandboxID).Memory.SnapshotBytes
	t.Logf("%d MiB touched, %.1f MiB stored", touchedMiB, float64(stored)/(1<<20))
	if stored < touchedMiB<<20 || stored >= mostMiB<<20 {
		t.Errorf("%d bytes stored for %d MiB of random memory, at most %d MiB allowed", stored, touchedMiB, mostMiB)
	}
	sameMemory(t, wake(t, sb.SandboxID), before)

	// A second sleep on top of the first keeps it all too.
	pause(t, sb.SandboxID)
	sb = wake(t, sb.SandboxID)
	sameMemory(t, sb, before)
}

// After a sleep the guest's clock is right, the random numbers are new, and files and variables are as they were.
func TestWakeIsTheSamePlaceAtAnotherTime(t *testing.T) {
	sb := newSandbox(t, rest.NewSandbox{EnvVars: map[string]string{"GREETING": "good morning"}})
	output(t, sb, "echo kept > ~/note; sudo touch /root/of-root")
	boot := output(t, sb, "cat /proc/sys/kernel/random/boot_id")
	pause(t, sb.SandboxID)
	sb = wake(t, sb.SandboxID)

	asked := time.Now()
	said := output(t, sb, "date +%s.%N")
	answered := time.Now()
	guest, err := strconv.ParseFloat(said, 64)
	if err != nil {
		t.Fatalf("date said %q", said)
	}
	at := time.UnixMicro(int64(guest * 1e6))
	if at.Before(asked.Add(-clockTolerance)) || at.After(answered.Add(clockTolerance)) {
		t.Errorf("the guest's clock says %v between %v and %v", at, asked, answered)
	}
	if now := output(t, sb, "cat /proc/sys/kernel/random/boot_id"); now != boot {
		t.Errorf("boot id %s became %s: it was booted and not woken", boot, now)
	}
	if got := output(t, sb, `cat ~/note; echo "$GREETING"; sudo ls /root/of-root`); got != "kept\ngood morning\n/root/of-root" {
		t.Errorf("found %q", got)
	}
}

// Sandboxes of one template, and wakes of one sandbox, must not draw the same random numbers.
func TestRandomNumbersDiffer(t *testing.T) {
	const draw = "head -c 16 /dev/urandom | od -An -tx1 | tr -d ' '; cat /proc/sys/kernel/random/uuid"
	one, two := newSandbox(t, rest.NewSandbox{}), newSandbox(t, rest.NewSandbox{})
	if one.SandboxID == two.SandboxID || one.AccessToken == two.AccessToken || one.AccessToken == "" {
		t.Errorf("ids %q and %q, tokens alike or missing", one.SandboxID, two.SandboxID)
	}
	seen := map[string]string{}
	note := func(who string, sb rest.Sandbox) {
		for number := range strings.FieldsSeq(output(t, sb, draw)) {
			if other, ok := seen[number]; ok {
				t.Errorf("%s drew %s, as %s did", who, number, other)
			}
			seen[number] = who
		}
	}
	note("the first", one)
	note("the second", two)
	pause(t, one.SandboxID)
	note("the first, woken", wake(t, one.SandboxID))
}
