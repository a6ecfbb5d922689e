package e2e

import (
	"bytes"
	"flag"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// kvmPackages have tests that skip where there is no usable KVM, no guest image, or no cgroup v2.
var kvmPackages = []string{"vmm/machine", "vmm/jail", "agent/cell", "agent/vmproc"}

var matrix = flag.Bool("matrix", false, "boot the whole matrix of machine shapes, which takes long in an emulated host")

// measurements are not tests; they have targets of their own (make bench-save).
const measurements = "^TestSaveKeepsUpWithTheDisk$"

// On the host that runs the microVMs nothing of them may be skipped.
func TestKVMPackagesOnTheHost(t *testing.T) {
	for _, pkg := range kvmPackages {
		t.Run(strings.ReplaceAll(pkg, "/", "-"), func(t *testing.T) { testOnHost(t, pkg) })
	}
}

// The whole boot matrix; a few of its shapes are among the tests of the package itself.
func TestBootMatrixOnTheHost(t *testing.T) {
	if !*matrix {
		t.Skip("takes ten minutes in an emulated host: make boot-matrix")
	}
	for line := range strings.Lines(testOnHost(t, "vmm/machine", "-test.run=TestBootMatrix", "-matrix")) {
		if _, row, ok := strings.Cut(line, "boot matrix | "); ok {
			t.Log(strings.TrimSpace(row))
		}
	}
}

// testOnHost runs the tests of a package on the host and returns what they print.
func testOnHost(t *testing.T, pkg string, args ...string) string {
	t.Helper()
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
	line := fmt.Sprintf("cd %s && TMPDIR=%s %s -test.v -test.skip='%s' -test.short=%t -test.timeout %s %s",
		dir, dir, remote, measurements, slowness > 1, limit(hostTestLimit), strings.Join(args, " "))
	code, stdout, stderr, err := sys.shellStatus(within(t, hostTestLimit), line)
	if err != nil {
		t.Fatal(err)
	}
	if code != 0 || !strings.Contains(stdout, "--- PASS") {
		t.Errorf("exit code %d\n%s%s", code, stdout, stderr)
	}
	for line := range strings.Lines(stdout) {
		if strings.Contains(line, "--- SKIP") {
			t.Errorf("skipped on a host that has KVM: %s", line)
		}
	}
	return stdout
}
