// Command bench measures, side by side in one run on one host, what Torpor is for: how long it takes from a client's request to
// the output of a first command when a sandbox starts from its template's snapshot, when it wakes from its own, and when the
// same machine is booted cold; and how long a pause takes. With the argument "footprint" it measures what a torpor-vmm takes
// beyond its guest's memory; with "restore" restores of the template alone, in variants and beside QEMU; with "floor", on this
// very machine and any KVM, what a resume costs more than the ioctls it cannot do without.
//
// Run on a hardware host it measures there; anywhere else it brings up the emulated host "test", measures inside it, and takes
// it down again if it was down. Absolute numbers of an emulated host say nothing about hardware; ratios do.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// options are the flags.
type options struct {
	rounds  int
	touched int // MiB
	csv     string
	onHost  bool
	api     string
	data    string
	vmm     string
	least   float64
	most    float64
	what    string
	peer    string
}

// What can be measured.
const (
	wakes      = "wake"
	footprints = "footprint"
	restores   = "restore"
	floors     = "floor"
)

// commands are all that can be measured.
var commands = []string{wakes, footprints, restores, floors}

func run(ctx context.Context) error {
	var o options
	flag.IntVar(&o.rounds, "rounds", 10, "measured rounds; one more before them warms the caches")
	flag.IntVar(&o.touched, "touched", 20, "`MiB` of memory a sandbox touches before it is paused")
	flag.StringVar(&o.csv, "csv", "bench.csv", "`file` for every single measurement")
	flag.Float64Var(&o.least, "least", 5, "fail if the median cold boot is not this many times slower than the template start; 0 asks for nothing")
	flag.Float64Var(&o.most, "most", 5, "with footprint: fail if a VMM takes more than this many `MiB`")
	flag.BoolVar(&o.onHost, "on-host", false, "measure on this very host, where Torpor is up")
	flag.StringVar(&o.api, "api", "http://127.0.0.1:3000", "with -on-host: `URL` of the control plane")
	flag.StringVar(&o.data, "data", "/var/lib/torpor", "with -on-host: data `directory`")
	flag.StringVar(&o.vmm, "vmm", "/usr/lib/torpor/bin/torpor-vmm", "with -on-host: the VMM `program`")
	flag.StringVar(&o.peer, "peer", "", "with -on-host and restore: `directory` of QEMU")
	flag.Parse()
	if o.what = wakes; flag.NArg() > 0 {
		o.what = flag.Arg(0)
	}
	if o.rounds < 1 || o.touched < 0 || flag.NArg() > 1 || !slices.Contains(commands, o.what) {
		return fmt.Errorf("rounds must be at least 1, touched at least 0, and the argument one of %q (see -h)", commands)
	}
	switch {
	case o.what == floors:
		return measureFloor(ctx, o, os.Stdout)
	case !o.onHost:
		return drive(ctx, o)
	case o.what == footprints:
		return footprint(ctx, o, os.Stdout)
	case o.what == restores:
		return measureRestores(ctx, o, os.Stdout)
	default:
		return measure(ctx, o, os.Stdout)
	}
}
