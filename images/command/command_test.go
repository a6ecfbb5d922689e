package command

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestRunOutput(t *testing.T) {
	out, err := Run(t.Context(), Command{Name: "sh", Args: []string{"-c", `echo "$X"; pwd >&2`}, Env: []string{"X=y"}, Dir: "/"})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := string(out.Stdout)+string(out.Stderr), "y\n/\n"; got != want {
		t.Errorf("output %q, want %q", got, want)
	}
}

func TestRunErrors(t *testing.T) {
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	tests := []struct {
		name string
		ctx  context.Context
		cmd  Command
		text string
		is   error
	}{
		{"missing", t.Context(), Command{Name: "no-such-tool-here"}, "no-such-tool-here is not installed", nil},
		{"last line", t.Context(), shell("echo one >&2; echo two >&2; exit 3"), "sh: exit status 3: two", nil},
		{"marked line", t.Context(), shell("echo E: the cause >&2; echo after >&2; exit 1"), "sh: exit status 1: E: the cause", nil},
		{"disk full", t.Context(), shell("echo write: No space left on device >&2; exit 1"), "sh: no space left on device: write: No space left on device", unix.ENOSPC},
		{"cancelled", cancelled, shell("exit 0"), "sh: context canceled", context.Canceled},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Run(tt.ctx, tt.cmd)
			if err == nil || err.Error() != tt.text {
				t.Fatalf("error %v, want %q", err, tt.text)
			}
			if tt.is != nil && !errors.Is(err, tt.is) {
				t.Errorf("error %v is not %v", err, tt.is)
			}
		})
	}
}

func TestMissingToolNamesItsPackage(t *testing.T) {
	err := &MissingToolError{Tool: "mke2fs"}
	if want := "mke2fs is not installed: run apt-get install e2fsprogs"; err.Error() != want {
		t.Errorf("%q, want %q", err, want)
	}
}

func shell(script string) Command { return Command{Name: "sh", Args: []string{"-c", script}} }

// What a confined tool started in the background ends with it.
func TestConfinedLeavesNothing(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("namespaces need root")
	}
	fifo := filepath.Join(t.TempDir(), "held")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	reader, err := os.OpenFile(fifo, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	cmd := shell(`echo $$; mount -t tmpfs x /mnt; exec 3>"$FIFO"; sleep 1000 >/dev/null 2>&1 & `)
	cmd.Confined, cmd.Env = true, []string{"FIFO=" + fifo}
	out, err := Run(t.Context(), cmd)
	if err != nil {
		t.Fatal(err)
	}
	if got := string(out.Stdout); got != "1\n" {
		t.Errorf("the tool is process %q, want to be the first of its namespace", got)
	}
	// The pipe reads as ended once nobody holds its other end: sleep would for 1000 s.
	if n, err := reader.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("read %d, %v; want the end", n, err)
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil || strings.Contains(string(mounts), "x /mnt tmpfs") {
		t.Errorf("its mount is ours too (%v)", err)
	}
}
