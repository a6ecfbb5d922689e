package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestLinkOut(t *testing.T) {
	dir := t.TempDir()
	out := filepath.Join(dir, "a/b/set")
	for _, target := range []string{"/one", "/two"} {
		if err := linkOut(out, target); err != nil {
			t.Fatal(err)
		}
		if got, err := os.Readlink(out); err != nil || got != target {
			t.Errorf("link to %q, %v; want %q", got, err, target)
		}
	}
	if err := linkOut(dir, "/one"); err == nil || !strings.Contains(err.Error(), "choose another --out") {
		t.Errorf("a directory in the way: %v", err)
	}
	if left, err := filepath.Glob(filepath.Join(dir, "a/b/.*")); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}

func TestExplainIsOneSentence(t *testing.T) {
	tests := []struct {
		err  error
		want string
	}{
		{fmt.Errorf("write: %w", unix.ENOSPC), "the disk is full: free some space"},
		{fmt.Errorf("mmdebstrap: %w", context.Canceled), "stopped; what was finished is kept"},
		{fmt.Errorf("a\nb"), "a; b"},
	}
	for _, tt := range tests {
		if got := explain(tt.err); !strings.HasPrefix(got, tt.want) || strings.Contains(got, "\n") {
			t.Errorf("%q, want one line that begins with %q", got, tt.want)
		}
	}
}

func TestVerifyAndInspectOfNothing(t *testing.T) {
	for _, verb := range []string{"verify", "inspect"} {
		cmd := root()
		cmd.SetArgs([]string{verb, t.TempDir()})
		if err := cmd.ExecuteContext(t.Context()); err == nil {
			t.Errorf("%s of an empty directory succeeds", verb)
		}
	}
}
