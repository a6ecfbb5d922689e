package id

import (
	"regexp"
	"testing"
)

func TestNewSandboxIsValidAndUnique(t *testing.T) {
	seen := map[string]bool{}
	form := regexp.MustCompile(`^i[a-z0-9]{20}$`)
	for range 1000 {
		s := NewSandbox()
		if !form.MatchString(s) || !ValidSandbox(s) || seen[s] {
			t.Fatalf("bad or repeated id %q", s)
		}
		seen[s] = true
	}
}

func TestValidSandbox(t *testing.T) {
	for s, want := range map[string]bool{"i1a2": true, "": false, "a-b": false, "a.b": false, "A": false, "é": false, "a/b": false} {
		if ValidSandbox(s) != want {
			t.Errorf("ValidSandbox(%q) = %v", s, !want)
		}
	}
}

func TestNewAPIKeyForm(t *testing.T) {
	if k := NewAPIKey(); !regexp.MustCompile(`^e2b_[0-9a-f]{40}$`).MatchString(k) {
		t.Errorf("bad key form %q", k)
	}
}
