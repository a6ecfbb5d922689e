// Command torpor-controlplane serves E2B's REST API, Torpor's /v1, and all sandbox traffic on one listener. It remembers
// what should exist and for whom; what runs is asked of the agent.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall" //nolint:depguard // names of signals and error numbers, no call

	"github.com/rs/zerolog"
)

func main() {
	cfg, err := parseConfig(os.Args[1:], os.Stderr)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	log := zerolog.New(os.Stderr).With().Timestamp().Str("component", "controlplane").Logger()
	if err == nil {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		err = run(ctx, cfg, log)
		stop()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "torpor-controlplane:", err)
		os.Exit(1)
	}
}
