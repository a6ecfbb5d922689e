package e2e

import (
	"bytes"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// kvmPackages have tests that skip where there is no usable KVM, or no guest image.
var kvmPackages = []string{"vmm/machine"}

// On the host that runs the microVMs nothing of them may be skipped.
func TestKVMPackagesOnTheHost(t *testing.T) {
	for _, pkg := range kvmPackages {
		t.Run(strings.ReplaceAll(pkg, "/", "-"), func(t *testing.T) {
			binary := filepath.Join(t.TempDir(), strings.ReplaceAll(pkg, "/", "-")+".test")
			build := exec.CommandContext(within(t, hostTestLimit), "go", "test", "-c", "-o", binary, "./"+pkg)
			build.Dir = sys.root
			build.Env = append(sys.env, "CGO_ENABLED=0")
			var complaint bytes.Buffer
			build.Stderr = &complaint
			if err := build.Run(); err != nil {
				t.Fatalf("building: %v\n%s", err, &complaint)
			}
			const dir = "/var/lib/torpor/e2e"
			remote := dir + "/" + filepath.Base(binary)
			if err := sys.push(within(t, callLimit), binary, remote); err != nil {
				t.Fatal(err)
			}
			defer hostShell(t, "rm -rf "+dir)
			line := fmt.Sprintf("cd %s && TMPDIR=%s %s -test.v -test.short=%t -test.timeout %s",
				dir, dir, remote, slowness > 1, limit(hostTestLimit))
			code, stdout, stderr, err := sys.shellStatus(within(t, hostTestLimit), line)
			if err != nil {
				t.Fatal(err)
			}
			if code != 0 || !strings.Contains(stdout, "--- PASS") {
				t.Errorf("exit code %d\n%s%s", code, stdout, stderr)
			}
			t.Log(stdout)
			for line := range strings.Lines(stdout) {
				if strings.Contains(line, "--- SKIP") {
					t.Errorf("skipped on a host that has KVM: %s", line)
				}
			}
		})
	}
}
