package e2e

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"torpor/tools/hostvm"
)

// The SDKs under test, as package names in package.json.
const (
	sdkNew = "e2b"     // 2.51.0: v2 create and connect
	sdkOld = "e2b-246" // 2.46.1: v1 routes
)

// installSDKs runs npm ci where what is installed is not what the lock file says.
func installSDKs(ctx context.Context, root string) error {
	ctx, cancel := context.WithTimeout(ctx, npmLimit)
	defer cancel()
	for _, dir := range []string{filepath.Join(root, "tools", "e2e"), filepath.Join(root, "examples")} {
		lock, err := os.ReadFile(filepath.Join(dir, "package-lock.json"))
		if err != nil {
			return err
		}
		mark := filepath.Join(dir, "node_modules", ".torpor-lock")
		if installed, err := os.ReadFile(mark); err == nil && bytes.Equal(installed, lock) {
			continue
		}
		cmd := exec.CommandContext(ctx, tool("npm"), "ci", "--no-audit", "--no-fund")
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("npm ci in %s: %w: %s", dir, err, out)
		}
		if err := os.WriteFile(mark, lock, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// tool finds node or npm: one the set-up put into the cache because the distribution's is too old goes first.
func tool(name string) string {
	if cache, err := hostvm.CacheDir(); err == nil {
		if path := filepath.Join(cache, "tools", "node-20", "bin", name); exists(path) {
			return path
		}
	}
	return name
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// script runs one of js/*.mjs with an SDK and hands every line of JSON it reports to each, on the test's goroutine. The test
// fails, with the script's own words, if the script does.
func script(t *testing.T, sdk string, max time.Duration, each func(line json.RawMessage), name string, args ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit(max))
	defer cancel()
	path := filepath.Join(sys.root, "tools", "e2e", "js", name)
	cmd := exec.CommandContext(ctx, tool("node"), append([]string{path}, args...)...)
	cmd.Env = append(append(sys.env, sys.sdkEnv()...),
		"E2E_SDK="+sdk,
		"E2E_BUDGET_MS="+millis(limit(callLimit)),
		"E2E_FIRST_COMMAND_MS="+millis(limit(firstCommandLimit)))
	runReporting(t, cmd, each)
}

// runReporting passes each JSON line of the command's output on and logs the others.
func runReporting(t *testing.T, cmd *exec.Cmd, each func(json.RawMessage)) {
	t.Helper()
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if line := lines.Bytes(); json.Valid(line) && bytes.HasPrefix(line, []byte("{")) && each != nil {
			each(bytes.Clone(line))
		} else {
			t.Logf("%s", line)
		}
	}
	if _, err := io.Copy(io.Discard, out); err != nil && !errors.Is(err, os.ErrClosed) {
		t.Log(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%s: %v\n%s", filepath.Base(cmd.Args[1]), err, cmp.Or(strings.TrimSpace(stderr.String()), "(it said nothing)"))
	}
}

func millis(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }

// decode reads one reported line into v.
func decode(t *testing.T, line json.RawMessage, v any) {
	t.Helper()
	if err := json.Unmarshal(line, v); err != nil {
		t.Fatalf("%s: %v", line, err)
	}
}
