package pid1

import (
	"time"

	"golang.org/x/sys/unix"
)

// powerOff ends all processes, first asking, then not, writes everything to the disk, and ends the machine.
func (p *PID1) powerOff(r *reaper) {
	p.Log.Info().Msg("shutting down")
	for _, step := range []struct {
		sig   unix.Signal
		grace time.Duration
	}{{unix.SIGTERM, termGrace}, {unix.SIGKILL, killGrace}} {
		_ = unix.Kill(-1, step.sig) // ESRCH: nobody is left
		if r.emptied(step.grace) {
			break
		}
	}
	unix.Sync()
	if err := unix.Mount("", "/", "", unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_NOATIME, ""); err != nil {
		p.Log.Error().Err(err).Msg("making the root read-only")
	}
	unix.Sync()
	// By ACPI S5: the VMM tells this end from a reset.
	err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	p.Log.Error().Err(err).Msg("switching the machine off")
}

// emptied waits until no process but PID 1 is left, for at most grace.
func (r *reaper) emptied(grace time.Duration) bool {
	deadline := time.NewTimer(grace)
	defer deadline.Stop()
	for r.reap() {
		select {
		case <-r.changed:
		case <-deadline.C:
			return false
		}
	}
	return true
}
