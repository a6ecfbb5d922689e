// Command devbench measures the machine itself beside a peer: torpor-vmm and QEMU's microvm boot the same kernel with the same
// workload and the same disk on one host, in turns, and it compares KVM exits per boot, block, vsock and network throughput and
// latency. Run it inside the repository: it brings the host up, takes the machine's own QEMU there, and reports here.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// options are the flags.
type options struct {
	rounds    int
	workloads string
	onHost    string
	least     float64
	profile   bool
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "devbench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	var o options
	flag.IntVar(&o.rounds, "rounds", 3, "how often each VMM boots and works")
	flag.StringVar(&o.workloads, "workloads", "block,vsock,net", "what the guest does")
	flag.StringVar(&o.onHost, "on-host", "", "measure on this very host, with what is in this `directory`")
	flag.Float64Var(&o.least, "least", 0, "fail if torpor-vmm is below this share of QEMU anywhere; 0 asks for nothing")
	flag.BoolVar(&o.profile, "profile", false, "tell also what each MiB and each operation cost the host: exits, switches, time")
	flag.Parse()
	if o.rounds < 1 || flag.NArg() > 0 {
		return fmt.Errorf("rounds must be at least 1, and there are no arguments (see -h)")
	}
	if o.onHost == "" {
		return drive(ctx, o)
	}
	return measure(ctx, o, os.Stdout)
}
