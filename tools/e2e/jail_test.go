package e2e

import (
	"fmt"
	"strings"
	"testing"

	"torpor/tools/rest"
)

// What runs the sandboxes of users is jailed, each on its own. That a jail holds is the matter of vmm/jail's tests; here it is
// whether the processes of a whole system are in one.
func TestVMMsAreJailed(t *testing.T) {
	seen := map[string]string{}
	for range 2 {
		sb := newSandbox(t, rest.NewSandbox{})
		pid := vmmPID(t, sb.SandboxID)
		status := map[string]string{}
		for line := range strings.Lines(hostShell(t, "cat /proc/"+pid+"/status")) {
			name, value, _ := strings.Cut(line, ":")
			status[name] = strings.Join(strings.Fields(value), " ")
		}
		none := strings.Repeat("0", 16)
		for name, want := range map[string]string{
			"CapInh": none, "CapPrm": none, "CapEff": none, "CapBnd": none, "CapAmb": none, "NoNewPrivs": "1", "Seccomp": "2", "Groups": "",
		} {
			if status[name] != want {
				t.Errorf("%s is %q, want %q", name, status[name], want)
			}
		}
		uid, _, _ := strings.Cut(status["Uid"], " ")
		if len(uid) < 10 {
			t.Errorf("it runs as user %s", uid)
		}
		facts := map[string]string{"user": uid, "limits": hostShell(t, "cat /proc/"+pid+"/cgroup")}
		for _, ns := range []string{"mnt", "pid", "net", "ipc", "uts", "cgroup"} {
			facts[ns] = hostShell(t, "readlink /proc/"+pid+"/ns/"+ns)
			if own := hostShell(t, "readlink /proc/self/ns/"+ns); facts[ns] == own {
				t.Errorf("namespace %s is the host's", ns)
			}
		}
		for what, fact := range facts {
			if seen[what] == fact {
				t.Errorf("two sandboxes share %s %s", what, fact)
			}
			seen[what] = fact
		}
		if got, want := hostShell(t, "ls -A /proc/"+pid+"/root"), "proc\ntorpor-vmm"; got != want {
			t.Errorf("its root holds %q, want %q", got, want)
		}
		_, path, _ := strings.Cut(facts["limits"], "::")
		limits := hostShell(t, fmt.Sprintf("cd /sys/fs/cgroup%s && cat memory.max cpu.max pids.max", path))
		if strings.Contains(limits, "max") || strings.Count(limits, "\n") != 2 {
			t.Errorf("limits of %s: %q", path, limits)
		}
	}
}
