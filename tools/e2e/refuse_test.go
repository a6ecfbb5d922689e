package e2e

import (
	"fmt"
	"strings"
	"testing"
)

// A host that cannot work says so in one sentence that tells what to do, and exits non-zero. Each case runs beside the system
// under test, with directories of its own.
func TestHostThatCannotWorkSaysWhy(t *testing.T) {
	const dir = "/run/torpor-e2e"
	bin := sys.hostBin()
	port := "0.0.0.0:3000"
	if sys.instance == nil {
		port = listenAddr
	}
	up := fmt.Sprintf("%s/torpor up --native --data %s/data --run %s/run --images /var/lib/torpor/images", bin, dir, dir)
	agent := fmt.Sprintf("%s/torpor-agent --data %s/data/agent --run %s/run --images /var/lib/torpor/images --vmm %s/torpor-vmm", bin, dir, dir, bin)
	plane := fmt.Sprintf("%s/torpor-controlplane --data %s/data/cp --agent /run/torpor/agent.sock --gateway /run/torpor/gateway.sock --listen %s", bin, dir, port)
	cases := []struct {
		name, prepare, command, want string
		alone                        bool // the sentence is all it says; daemons may log before
	}{
		{"no KVM", "mount -t tmpfs none /dev", up + " --listen 127.0.0.1:3999", "/dev/kvm", true},
		{"no KVM, the agent", "mount -t tmpfs none /dev", agent, "/dev/kvm", false},
		{"no cgroups", "umount /sys/fs/cgroup", up + " --listen 127.0.0.1:3999", "cgroup v2", true},
		{"no cgroups, the agent", "umount /sys/fs/cgroup", agent, "cgroup v2", false},
		{"disk full", "mount -t tmpfs -o size=16m none " + dir + "/data", up + " --listen 127.0.0.1:3999", "full", true},
		{
			"disk full, the agent", "mount -t tmpfs -o size=1m none " + dir + "/data; cat /dev/zero > " + dir + "/data/ballast 2>/dev/null; true",
			agent, "", false,
		},
		{"port in use", "true", up + " --listen " + port, "in use", true},
		{"port in use, the control plane", "true", plane, "in use", false},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			defer hostShell(t, "rm -rf "+dir)
			// In a mount namespace of its own, so that nothing of the preparation outlives it.
			inner := fmt.Sprintf("mkdir -p %s/data %s/run; { %s; } && exec %s", dir, dir, c.prepare, c.command)
			line := "exec unshare -m sh -c '" + strings.ReplaceAll(inner, "'", `'\''`) + "'"
			code, stdout, stderr, err := sys.shellStatus(within(t, callLimit), line)
			if err != nil {
				t.Fatal(err)
			}
			lines := strings.Split(strings.TrimSpace(stderr), "\n")
			last := lines[len(lines)-1]
			if code == 0 || !strings.Contains(last, c.want) || last == "" {
				t.Errorf("exit code %d, last words %q, want non-zero and %q", code, last, c.want)
			}
			if c.alone && (len(lines) != 1 || stdout != "") {
				t.Errorf("more than one sentence:\n%s%s", stdout, stderr)
			}
			if strings.Contains(stderr, "goroutine ") {
				t.Errorf("it panicked:\n%s", stderr)
			}
		})
	}
}
