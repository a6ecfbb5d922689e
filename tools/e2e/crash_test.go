package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"torpor/tools/rest"
)

// kill -9 of the agent is nothing to a running sandbox.
func TestAgentDiesAndSandboxLives(t *testing.T) {
	sb := newSandbox(t, rest.NewSandbox{})
	before := keepMemory(t, sb, 1)
	vmm, incarnation := vmmPID(t, sb.SandboxID), state(t, sb.SandboxID).Incarnation
	agent := hostShell(t, "pidof torpor-agent")
	hostShell(t, "kill -9 "+agent)

	eventually(t, recoverLimit, "a new agent knows the sandbox", func(ctx context.Context) error {
		now, err := sys.shell(ctx, "pidof torpor-agent")
		if err != nil || strings.TrimSpace(now) == agent {
			return fmt.Errorf("no new agent: %q %w", now, err)
		}
		s, err := sys.State(ctx, sb.SandboxID)
		if err == nil && s.Public != "running" {
			err = errors.New("it is called " + s.Public + ": vm " + s.VM.State + ", envd " + s.Envd.State)
		}
		return err
	})
	if now := vmmPID(t, sb.SandboxID); now != vmm {
		t.Errorf("the VMM was process %s and is %s", vmm, now)
	}
	if now := state(t, sb.SandboxID).Incarnation; now != incarnation {
		t.Errorf("incarnation %d became %d: the VM was started anew", incarnation, now)
	}
	sameMemory(t, sb, before)
	pause(t, sb.SandboxID)
	sameMemory(t, wake(t, sb.SandboxID), before)
}

// kill -9 of a VMM is a stop with a reason, and nothing that calls itself running.
func TestVMMDiesAndIsReported(t *testing.T) {
	sb := newSandbox(t, rest.NewSandbox{})
	hostShell(t, "kill -9 "+vmmPID(t, sb.SandboxID))
	s := awaitDead(t, sb.SandboxID)
	if s.VM.Reason == "" {
		t.Error("no reason is given")
	}
	t.Logf("vm %s: %s; envd %s", s.VM.State, s.VM.Reason, s.Envd.State)
	if _, err := sys.Processes(within(t, callLimit), sb); err == nil {
		t.Error("a data-plane call was answered by a dead VM")
	}
	list, err := sys.List(within(t, callLimit), "running")
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range list {
		if d.SandboxID == sb.SandboxID {
			t.Error("it is listed as running")
		}
	}
}

// A VMM that dies after a pause and a wake costs what was done since, not the sandbox.
func TestVMMDiesAndLastSnapshotServes(t *testing.T) {
	sb := newSandbox(t, rest.NewSandbox{})
	before := keepMemory(t, sb, 1)
	pause(t, sb.SandboxID)
	sb = wake(t, sb.SandboxID)
	hostShell(t, "kill -9 "+vmmPID(t, sb.SandboxID))
	awaitDead(t, sb.SandboxID)
	sameMemory(t, wake(t, sb.SandboxID), before)
}

// A guest whose kernel panics is said to have done that, with what it said last, and its last snapshot serves.
func TestGuestPanicIsReported(t *testing.T) {
	sb := newSandbox(t, rest.NewSandbox{})
	before := keepMemory(t, sb, 1)
	pause(t, sb.SandboxID)
	sb = wake(t, sb.SandboxID)
	if _, err := sys.Output(within(t, commandLimit), sb, "sudo sh -c 'echo c > /proc/sysrq-trigger'"); err == nil {
		t.Error("the command came back")
	}
	if s := awaitDead(t, sb.SandboxID); !strings.Contains(s.VM.Reason, "panic (Kernel panic - not syncing: sysrq") {
		t.Errorf("reason %q", s.VM.Reason)
	}
	sameMemory(t, wake(t, sb.SandboxID), before)
}

func awaitDead(t *testing.T, id string) rest.State {
	t.Helper()
	s, err := sys.WaitState(within(t, waitLimit), id, func(s rest.State) bool {
		return s.VM.State == "stopped" || s.VM.State == "failed"
	})
	if err != nil {
		t.Fatal(err)
	}
	if s.Public == "running" || s.Envd.State == "ready" {
		t.Errorf("public %s, envd %s for a VM that is %s", s.Public, s.Envd.State, s.VM.State)
	}
	return s
}

// vmmPID is the process that runs a sandbox.
func vmmPID(t *testing.T, id string) string {
	t.Helper()
	line := fmt.Sprintf(`for p in $(pidof torpor-vmm); do tr '\0' ' ' < /proc/$p/cmdline | grep -q '/%s ' && echo $p; done; true`, id)
	pid := hostShell(t, line)
	if pid == "" || strings.ContainsAny(pid, "\n ") {
		t.Fatalf("VMM processes of %s: %q, want one", id, pid)
	}
	return pid
}

func hostShell(t *testing.T, line string) string {
	t.Helper()
	out, err := sys.shell(within(t, callLimit), line)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(out)
}

// knock sends GET /health as the SDKs do and returns the answer.
func knock(t *testing.T, sb rest.Sandbox) (status int, body string) {
	t.Helper()
	req, err := http.NewRequestWithContext(within(t, callLimit), http.MethodGet, sys.Sandbox+"/health", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("E2b-Sandbox-Id", sb.SandboxID)
	req.Header.Set("E2b-Sandbox-Port", "49983")
	req.Header.Set("X-Access-Token", sb.AccessToken)
	resp, err := sys.HTTP.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

// mask takes the sandbox's own name out of a text, so that two can be compared.
func mask(text, id string) string { return strings.ReplaceAll(text, id, "ID") }
