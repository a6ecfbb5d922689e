package main

import (
	"time"

	"golang.org/x/sys/unix"
)

// An emulated processor's clock is set from a clock chip that counts whole seconds, and runs a little fast or slow.
// Each exec brings the client's time with it, so the emulated host's clock follows that of the machine around it.
const (
	stepFrom = 500 * time.Millisecond // an error from here on is corrected at once
	slewFrom = 20 * time.Millisecond  // from here on gently; below it is the noise of the way here
)

func followClock(now time.Time) {
	off := time.Until(now)
	switch {
	case off.Abs() >= stepFrom:
		tv := unix.NsecToTimeval(now.UnixNano())
		if err := unix.Settimeofday(&tv); err != nil {
			report("set the clock: %v", err)
		}
	case off.Abs() >= slewFrom:
		tx := unix.Timex{Modes: unix.ADJ_OFFSET_SINGLESHOT, Offset: off.Microseconds()}
		if _, err := unix.Adjtimex(&tx); err != nil {
			report("adjust the clock: %v", err)
		}
	}
}
