// Command torpor-agent runs the sandboxes of one host: it is the truth about what runs there. It serves its contract
// (api/agentpb) and the data plane on two unix sockets, and starts one torpor-vmm process for each microVM; those live on when
// the agent ends, and the next agent takes them over.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	ttrpclog "github.com/containerd/log"
	"github.com/rs/zerolog"
)

func main() {
	cfg, err := parseConfig(os.Args[1:], os.Stderr)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err := ttrpclog.SetLevel("panic"); err != nil { // ttrpc logs what its callers get as errors
		fmt.Fprintln(os.Stderr, "torpor-agent:", err)
	}
	log := zerolog.New(os.Stderr).With().Timestamp().Str("component", "agent").Logger()
	if err == nil {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		err = run(ctx, cfg, log)
		stop()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "torpor-agent:", err)
		os.Exit(1)
	}
}
