package e2e

import (
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// The example is what a newcomer runs first: it must work with the newest SDK (v2 routes) and an older one (v1 routes).
func TestHelloExample(t *testing.T) {
	for _, sdk := range []string{sdkNew, sdkOld} {
		t.Run(sdk, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), limit(scriptLimit))
			defer cancel()
			cmd := exec.CommandContext(ctx, tool("node"), exampleWith(t, sdk))
			cmd.Env = append(sys.env, sys.sdkEnv()...)
			runReporting(t, cmd, func(line json.RawMessage) { t.Logf("%s", line) })
		})
	}
}

// exampleWith copies the example to where `import 'e2b'` finds the SDK given, and the CLI is where it expects it.
func exampleWith(t *testing.T, sdk string) string {
	t.Helper()
	dir := t.TempDir()
	path := filepath.Join(dir, "examples", "hello.mjs")
	for _, d := range []string{"examples/node_modules"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	links := map[string]string{
		filepath.Join(sys.root, "tools", "e2e", "node_modules", sdk): filepath.Join(dir, "examples", "node_modules", "e2b"),
		filepath.Join(sys.root, ".bin"):                              filepath.Join(dir, ".bin"),
	}
	for from, to := range links {
		if err := os.Symlink(from, to); err != nil {
			t.Fatal(err)
		}
	}
	in, err := os.Open(filepath.Join(sys.root, "examples", "hello.mjs"))
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(out, in); err != nil {
		t.Fatal(err)
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}
