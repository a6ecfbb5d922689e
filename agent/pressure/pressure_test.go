package pressure

import (
	"context"
	"os"
	"path/filepath"
	"testing"
)

func file(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestAvailable(t *testing.T) {
	for content, want := range map[string]uint64{
		"MemTotal:   100 kB\nMemAvailable:    42 kB\n": 42 << 10,
		"MemTotal: 100 kB\n":                           0,
		"MemAvailable: lots kB\n":                      0,
		"MemAvailable: 18446744073709551615 kB\n":      0,
	} {
		got, err := (&Host{Meminfo: file(t, content)}).Available()
		if got != want || (err == nil) != (want > 0) {
			t.Errorf("%q: %d, %v", content, got, err)
		}
	}
	if n, err := New(0).Available(); err != nil || n == 0 {
		t.Errorf("this host: %d, %v", n, err)
	}
}

// A host without counted stalls is watched all the same, and the watch ends.
func TestWatchTellsOfTooLittle(t *testing.T) {
	for name, psi := range map[string]string{"with stalls": "/proc/pressure/memory", "without": "/no/such/file"} {
		t.Run(name, func(t *testing.T) {
			h := &Host{Floor: 1 << 20, Meminfo: file(t, "MemAvailable: 10 kB\n"), PSI: psi}
			ctx, cancel := context.WithCancel(t.Context())
			told := false
			h.Watch(ctx, func() { told = true; cancel() })
			if !told {
				t.Error("it was not told")
			}
		})
	}
}
