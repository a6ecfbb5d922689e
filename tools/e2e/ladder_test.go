package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"torpor/tools/rest"
)

// With its newest sleep damaged a sandbox wakes as it was at the one before, and says so; with all of them damaged it does not wake but
// tells why, and boots on its disk if asked to.
func TestWakeFallsBackAndSaysSo(t *testing.T) {
	w := startWitness(t, newSandbox(t, rest.NewSandbox{}))
	id := w.sb.SandboxID
	output(t, w.sb, "echo kept > ~/note && sync")
	boot := output(t, w.sb, "cat /proc/sys/kernel/random/boot_id")
	first := w.check(t)
	pause(t, id)
	w.sb = wake(t, id)
	wantMode(t, id, "memory")
	w.check(t)
	pause(t, id)

	newest := hostShell(t, "cd "+sandboxDir(id)+" && ls -d gen-* | sort -t- -k2n | tail -n 1")
	file := hostShell(t, fmt.Sprintf("find %s/%s -type f -links 1 -exec stat -c '%%s %%n' {} + | sort -n | tail -n 1 | cut -d' ' -f2", sandboxDir(id), newest))
	hostShell(t, "f='"+file+"'; "+flip("middle", "size / 2").do)
	t.Logf("%s is damaged", file)
	w.sb = wake(t, id)
	wantMode(t, id, "memory-previous")
	told := false
	for _, e := range afterLast(eventsOf(t, id), "paused") {
		told = told || strings.Contains(e.Reason, "previous")
	}
	if !told {
		t.Error("no event tells that it woke from an earlier sleep")
	}
	w.last = testimony{Nonce: first.Nonce, PID: first.PID, Block: first.Block, Count: first.Count, Monotonic: first.Monotonic}
	w.check(t)
	pause(t, id) // from here it goes on as ever
	w.sb = wake(t, id)
	wantMode(t, id, "memory")
	w.check(t)
	pause(t, id)

	hostShell(t, "for m in "+sandboxDir(id)+"/gen-*/manifest.json; do rm $m; done")
	_, _, err := sys.Connect(within(t, callLimit), id, lifetime)
	wantError(t, err, http.StatusInternalServerError)
	body := map[string]any{"memory": false, "timeout": int(lifetime.Seconds())}
	if _, err := sys.Do(within(t, callLimit), http.MethodPost, "/v2/sandboxes/"+id+"/connect", body, &w.sb); err != nil {
		t.Fatalf("connect with memory:false: %v", err)
	}
	wantMode(t, id, "disk")
	if now := output(t, w.sb, "cat /proc/sys/kernel/random/boot_id"); now == boot {
		t.Error("it was not booted")
	}
	if got := output(t, w.sb, "cat ~/note"); got != "kept" {
		t.Errorf("its disk says %q", got)
	}
	pause(t, id)
	w.sb = wake(t, id)
	wantMode(t, id, "memory")
	output(t, w.sb, "true")
}

// wantMode demands what the present incarnation is said to have begun from.
func wantMode(t *testing.T, id, want string) {
	t.Helper()
	raw, err := sys.RawState(within(t, callLimit), id)
	if err != nil {
		t.Fatal(err)
	}
	var said struct{ ResumeMode string }
	if err := json.Unmarshal(raw, &said); err != nil || said.ResumeMode != want {
		t.Errorf("resume mode %q, want %q (%v)", said.ResumeMode, want, err)
	}
}
