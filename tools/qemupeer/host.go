package qemupeer

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// LoadModules loads the host modules of an archive that was unpacked in dir. One that is loaded stays.
func LoadModules(ctx context.Context, dir string) error {
	drivers, err := filepath.Glob(filepath.Join(dir, modulesDir, "*.ko"))
	if err != nil {
		return err
	}
	loaded, err := os.ReadFile("/proc/modules")
	if err != nil {
		return err
	}
	for _, d := range drivers {
		_, name, _ := strings.Cut(strings.TrimSuffix(filepath.Base(d), ".ko"), "-")
		if strings.Contains("\n"+string(loaded), "\n"+strings.ReplaceAll(name, "-", "_")+" ") {
			continue
		}
		if out, err := exec.CommandContext(ctx, "insmod", d).CombinedOutput(); err != nil {
			return fmt.Errorf("loading %s: %w: %s", name, err, out)
		}
	}
	return nil
}

// Command is the QEMU of an archive that was unpacked in dir.
func Command(dir string, args ...string) *exec.Cmd {
	in := func(name string) string { return filepath.Join(dir, name) }
	args = append([]string{"--library-path", in(libDir), in(program), "-L", in(biosDir)}, args...)
	cmd := exec.Command(filepath.Join(dir, libDir, "ld-linux-x86-64.so.2"), args...)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	return cmd
}
