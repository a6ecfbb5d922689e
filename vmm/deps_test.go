package main

import (
	"os/exec"
	"strings"
	"testing"
)

// The process exists once for each microVM, so what it links is paid for by every sandbox.
func TestNoHTTPInTheVMM(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Skipf("needs the go command and the sources: %v", err)
	}
	for dep := range strings.Lines(string(out)) {
		switch dep = strings.TrimSpace(dep); {
		case dep == "net/http", dep == "crypto/tls", strings.HasPrefix(dep, "torpor/agent"), strings.HasPrefix(dep, "torpor/controlplane"):
			t.Errorf("torpor-vmm depends on %s", dep)
		}
	}
}
