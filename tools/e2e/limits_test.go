package e2e

import "time"

// slowness is how much longer than on metal everything may take: 1 natively, emulatedSlowness in an emulated host. Limits are
// there to end a test that hangs; none of them is a claim about speed, since speeds are compared within one run only.
var slowness = 1

const emulatedSlowness = 10

// Limits on metal; limit multiplies them.
const (
	callLimit         = 30 * time.Second // one call of the API: create, pause, connect, ...
	commandLimit      = 20 * time.Second // one command in a sandbox
	firstCommandLimit = 3 * time.Second  // the first command after a connect
	pollerLimit       = 2 * time.Second  // a data-plane call of the poller, which may fall into a pause and the wake after it
	recoverLimit      = 30 * time.Second // the agent's restart, with all it finds
	waitLimit         = 60 * time.Second // an expected change of state
	scriptLimit       = 2 * time.Minute  // one SDK script
	cyclesLimit       = 5 * time.Minute  // the script of 20 cycles
	hostTestLimit     = 3 * time.Minute  // a test binary in the host
	damageLimit       = 5 * time.Second  // an answer about a damaged file

	setupLimit = 30 * time.Minute // bringing the system up, the image and the template included; not multiplied
	npmLimit   = 5 * time.Minute  // not multiplied
)

func limit(d time.Duration) time.Duration { return d * time.Duration(slowness) }

// clockTolerance is how far the guest's clock may be from the host's.
const clockTolerance = time.Second
