package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"time"

	"torpor/agent/cell"
	"torpor/agent/timing"
)

// version is set by the linker.
var version = "dev"

// Processes in the pool. The memory of each is small, but not nothing; more than a few are of use only to a host that starts many
// sandboxes at once.
const (
	defaultPool = 2
	maxPool     = 256
)

// config is everything an operator may choose.
type config struct {
	Data       string
	Run        string
	Images     string
	VMM        string
	NodeID     string
	Cells      cell.Config
	SlowFactor float64
	ReserveMiB uint64
	Pool       int

	FrozenFor      time.Duration
	MemoryFloorMiB uint64

	budgets timing.Budgets
}

// parseConfig reads the command line. Faults are reported together.
func parseConfig(args []string, usage io.Writer) (config, error) {
	var cfg config
	flags := flag.NewFlagSet("torpor-agent", flag.ContinueOnError)
	flags.SetOutput(usage)
	flags.StringVar(&cfg.Data, "data", "/var/lib/torpor/agent", "`directory` of the database, the templates and the sandboxes")
	flags.StringVar(&cfg.Run, "run", "/run/torpor", "`directory` of the sockets")
	flags.StringVar(&cfg.Images, "images", "/var/lib/torpor/images", "`directory` of the image sets; a template is made of each")
	flags.StringVar(&cfg.VMM, "vmm", "/usr/lib/torpor/bin/torpor-vmm", "the torpor-vmm `program`")
	flags.StringVar(&cfg.NodeID, "node-id", "", "`name` of this node (default: one made at the first start and kept)")
	cfg.Cells = cell.DefaultConfig
	flags.StringVar(&cfg.Cells.Parent, "cgroup", cfg.Cells.Parent, "`cgroup`, below the root of cgroup v2, that holds one for each microVM")
	flags.IntVar(&cfg.Cells.FirstUID, "first-uid", cfg.Cells.FirstUID,
		fmt.Sprintf("`number` of the first of %d users set apart for microVMs; agents with different cgroups need different ones", cfg.Cells.UIDs))
	flags.Float64Var(&cfg.SlowFactor, "slow-factor", 1, "`factor` for every time budget, for hosts slower than hardware")
	flags.Uint64Var(&cfg.ReserveMiB, "reserve-mib", 512, "`MiB` that must be free on the data disk for a create or a pause to begin")
	flags.IntVar(&cfg.Pool, "pool", defaultPool, "`number` of VMM processes kept ready for the next sandboxes, 0 for none")
	flags.DurationVar(&cfg.FrozenFor, "frozen-for", 0,
		"`time` for which a paused sandbox stays in memory as well as on disk, to wake at once; 0: not at all")
	flags.Uint64Var(&cfg.MemoryFloorMiB, "memory-floor-mib", 512, "`MiB` of available memory below which paused sandboxes do not stay in memory")
	if err := flags.Parse(args); err != nil {
		return cfg, err
	}
	if flags.NArg() > 0 {
		return cfg, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	return cfg, cfg.complete()
}

// complete checks the values and derives the budgets.
func (c *config) complete() error {
	var faults []error
	for _, f := range []struct{ name, value string }{
		{"--data", c.Data}, {"--run", c.Run}, {"--images", c.Images}, {"--vmm", c.VMM},
	} {
		if f.value == "" {
			faults = append(faults, fmt.Errorf("%s must not be empty", f.name))
		}
	}
	if c.ReserveMiB > 1<<30 {
		faults = append(faults, fmt.Errorf("--reserve-mib %d is more than any disk has", c.ReserveMiB))
	}
	if c.Pool < 0 || c.Pool > maxPool {
		faults = append(faults, fmt.Errorf("--pool %d: it must be between 0 and %d", c.Pool, maxPool))
	}
	if c.FrozenFor < 0 {
		faults = append(faults, fmt.Errorf("--frozen-for %v must not be negative", c.FrozenFor))
	}
	if c.MemoryFloorMiB > 1<<30 {
		faults = append(faults, fmt.Errorf("--memory-floor-mib %d is more than any host has", c.MemoryFloorMiB))
	}
	var err error
	if c.budgets, err = timing.New(c.SlowFactor); err != nil {
		faults = append(faults, fmt.Errorf("--slow-factor: %w", err))
	}
	return errors.Join(faults...)
}
