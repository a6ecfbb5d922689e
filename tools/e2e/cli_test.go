package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"os/exec"
	"strings"
	"testing"
	"time"

	"torpor/tools/rest"
)

// torpor runs the CLI and returns what it said.
func torpor(t *testing.T, stdin string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	cmd := exec.CommandContext(within(t, scriptLimit), sys.torpor, args...)
	cmd.Env = append(sys.env, sys.sdkEnv()...)
	var out, complaint bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &complaint
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), complaint.String()
}

func TestCLIOnALivingSandbox(t *testing.T) {
	sb := newSandbox(t, rest.NewSandbox{Metadata: map[string]string{"user_id": "cli"}})
	id := sb.SandboxID
	wantRow(t, id, "running", "running", "ready")

	if code, stdout, stderr := torpor(t, "", "exec", id, "--", "echo out; echo err >&2; exit 7"); code != 7 || stdout != "out\n" || stderr != "err\n" {
		t.Errorf("exec: %d %q %q", code, stdout, stderr)
	}
	if code, stdout, stderr := torpor(t, "a word\n", "exec", "-i", "-u", "root", id, "--", "sh", "-c", `read x; echo "$(id -un) read $x"`); code != 0 || stdout != "root read a word\n" {
		t.Errorf("exec with input: %d %q %q", code, stdout, stderr)
	}
	if code, _, stderr := torpor(t, "", "pause", id); code != 0 {
		t.Errorf("pause: %d %s", code, stderr)
	}
	wantRow(t, id, "paused", "paused", "absent")
	if code, _, stderr := torpor(t, "", "pause", id); code != 1 || !strings.Contains(stderr, "paused") {
		t.Errorf("second pause: %d %q", code, stderr)
	}
	if code, _, stderr := torpor(t, "", "exec", id, "--", "true"); code == 0 || !strings.Contains(stderr, "torpor resume "+id) {
		t.Errorf("exec on a paused one: %d %q", code, stderr)
	}
	if code, _, stderr := torpor(t, "", "resume", id); code != 0 {
		t.Errorf("resume: %d %s", code, stderr)
	}
	wantRow(t, id, "running", "running", "ready")
	if code, _, stderr := torpor(t, "", "logs", id); code != 0 {
		t.Errorf("logs: %d %s", code, stderr)
	}
	if code, stdout, _ := torpor(t, "", "events", id); code != 0 || !strings.Contains(stdout, "-> paused") {
		t.Errorf("events: %d\n%s", code, stdout)
	}
	if code, stdout, stderr := torpor(t, "", "doctor"); code != 0 || !strings.Contains(stdout, "daemons") {
		t.Errorf("doctor: %d\n%s%s", code, stdout, stderr)
	}
	if code, _, stderr := torpor(t, "", "kill", id); code != 0 {
		t.Errorf("kill: %d %s", code, stderr)
	}
	if code, _, _ := torpor(t, "", "state", id); code != 1 {
		t.Errorf("state after kill: %d", code)
	}
}

// wantRow demands what `torpor ps --json` says of one sandbox: the VM and envd apart.
func wantRow(t *testing.T, id, public, vm, envd string) {
	t.Helper()
	code, stdout, stderr := torpor(t, "", "ps", "--json")
	var rows []struct {
		SandboxID, Public string
		VM, Envd          struct{ State string }
		Metadata          map[string]string
	}
	if err := json.Unmarshal([]byte(stdout), &rows); err != nil || code != 0 {
		t.Fatalf("ps: %d, %v: %s%s", code, err, stdout, stderr)
	}
	for _, r := range rows {
		if r.SandboxID == id {
			if r.Public != public || r.VM.State != vm || r.Envd.State != envd || r.Metadata["user_id"] != "cli" {
				t.Errorf("ps says %+v; want %s, vm %s, envd %s", r, public, vm, envd)
			}
			return
		}
	}
	t.Errorf("ps does not list %s: %s", id, stdout)
}

// While it is up, `torpor up` only prints, and quickly in comparison with a start.
func TestUpAgainJustPrints(t *testing.T) {
	began := time.Now()
	code, stdout, stderr := torpor(t, "", "up", "--instance", instanceName, "--listen", listenAddr)
	want := strings.Join(sys.sdkEnv(), "\n") + "\n"
	if code != 0 || stdout != want {
		t.Errorf("%d %q, want %q; %s", code, stdout, want, stderr)
	}
	t.Logf("took %v", time.Since(began))
}
