// Package timing holds every budget, grace and period of the agent, so that they can be read together and scaled together:
// a software-emulated host is ten times slower than a real one, and no constant may be forgotten there.
package timing

import (
	"fmt"
	"time"
)

// Budgets are the bounds of everything the agent waits for. A zero Budgets is useless: make one with New.
type Budgets struct {
	VMMStart  time.Duration // exec of torpor-vmm to its socket answering
	Restore   time.Duration // Restore or Boot call: KVM, memory mapping, devices
	Handshake time.Duration // first contact with envd after a restore, to the handshake's answer and a matching probe
	Pause     time.Duration // VMM Pause or Resume call
	Save      time.Duration // VMM Save call: writes and syncs the dirty pages
	Quit      time.Duration // VMM Quit call to the process's end; past it the process is killed
	Kill      time.Duration // SIGKILL to the process's end

	PauseGrace time.Duration // for requests in flight when a pause begins
	Hold       time.Duration // for a data-plane request that waits for readiness
	Dial       time.Duration // one connection into a guest

	ColdBoot     time.Duration // the Boot call has returned, to the guest's hello
	WarmUp       time.Duration // the commands run in a template before it is saved
	TemplateWait time.Duration // for a create that waits for the template's build

	ProbeEvery   time.Duration // readiness probe of a running guest
	ProbeTimeout time.Duration // one probe
	RetryMin     time.Duration // first back-off of what is tried again (recovery of envd, pause on deadline)
	RetryMax     time.Duration // its ceiling

	PoolRefill time.Duration // after a process was taken from the pool, until another is started: the start it was for is over then

	Stop time.Duration // for transitions under way when the agent ends
}

// New returns the budgets for a host that is factor times slower than hardware; factor is at least 1 and at most 1000.
func New(factor float64) (Budgets, error) {
	if !(factor >= 1 && factor <= 1000) { // also refuses NaN
		return Budgets{}, fmt.Errorf("slow factor %v: it must be between 1 and 1000", factor)
	}
	scaled := func(d time.Duration) time.Duration { return time.Duration(float64(d) * factor) }
	return Budgets{
		VMMStart:  scaled(5 * time.Second),
		Restore:   scaled(10 * time.Second),
		Handshake: scaled(10 * time.Second),
		Pause:     scaled(5 * time.Second),
		Save:      scaled(60 * time.Second),
		Quit:      scaled(5 * time.Second),
		Kill:      scaled(10 * time.Second),

		PauseGrace: scaled(300 * time.Millisecond),
		Hold:       scaled(60 * time.Second),
		Dial:       scaled(5 * time.Second),

		ColdBoot:     scaled(60 * time.Second),
		WarmUp:       scaled(60 * time.Second),
		TemplateWait: scaled(150 * time.Second),

		ProbeEvery:   scaled(5 * time.Second),
		ProbeTimeout: scaled(3 * time.Second),
		RetryMin:     100 * time.Millisecond,
		RetryMax:     scaled(10 * time.Second),

		PoolRefill: scaled(200 * time.Millisecond),

		Stop: scaled(10 * time.Second),
	}, nil
}
