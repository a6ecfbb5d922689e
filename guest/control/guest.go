package control

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"torpor/guest/env"
)

// Guest is the System of a real guest.
type Guest struct {
	// Markers is the directory of the marker files, MachineID the file of the machine's identity.
	Markers, MachineID string
	// Init is the process to ask for a shutdown: PID 1.
	Init int
}

// SetClock steps CLOCK_REALTIME.
func (Guest) SetClock(t time.Time) error {
	ts := unix.NsecToTimespec(t.UnixNano())
	if err := unix.ClockSettime(unix.CLOCK_REALTIME, &ts); err != nil {
		return fmt.Errorf("setting the clock: %w", err)
	}
	return nil
}

// Reseed feeds the kernel's generator.
func (Guest) Reseed(entropy []byte) error {
	f, err := os.OpenFile("/dev/urandom", os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("opening the random number generator: %w", err)
	}
	defer f.Close()
	if err := addEntropy(f, entropy); err != nil {
		return fmt.Errorf("crediting entropy: %w", err)
	}
	if err := unix.IoctlSetInt(int(f.Fd()), unix.RNDRESEEDCRNG, 0); err != nil {
		return fmt.Errorf("reseeding the random number generator: %w", err)
	}
	return nil
}

// Mark writes the marker files.
func (g Guest) Mark(id *env.Identity) error {
	if err := os.MkdirAll(g.Markers, 0o755); err != nil {
		return fmt.Errorf("making the marker directory: %w", err)
	}
	for name, content := range map[string]string{
		".E2B_SANDBOX": "true", ".E2B_SANDBOX_ID": id.SandboxID, ".E2B_TEMPLATE_ID": id.TemplateID,
	} {
		if err := os.WriteFile(filepath.Join(g.Markers, name), []byte(content), 0o644); err != nil {
			return fmt.Errorf("writing marker %s: %w", name, err)
		}
	}
	return nil
}

// Renew writes a new /etc/machine-id; the generator was reseeded before.
func (g Guest) Renew() error {
	id := make([]byte, 16)
	if _, err := rand.Read(id); err != nil {
		return fmt.Errorf("making a machine id: %w", err)
	}
	if err := os.WriteFile(g.MachineID, []byte(hex.EncodeToString(id)+"\n"), 0o444); err != nil {
		return fmt.Errorf("writing the machine id: %w", err)
	}
	return nil
}

// Sync flushes all file systems.
func (Guest) Sync() { unix.Sync() }

// PowerOff asks PID 1 to shut down.
func (g Guest) PowerOff() error {
	if err := unix.Kill(g.Init, unix.SIGTERM); err != nil {
		return fmt.Errorf("asking process %d to shut down: %w", g.Init, err)
	}
	return nil
}
