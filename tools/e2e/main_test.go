package e2e

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"testing"
)

// sys is the one system all tests share.
var sys *system

func TestMain(m *testing.M) {
	flag.Parse()
	if testing.Short() {
		fmt.Println("end-to-end tests are skipped with -short")
		return
	}
	os.Exit(runAll(m))
}

func runAll(m *testing.M) (code int) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	state, err := os.MkdirTemp("", "torpor-e2e-")
	if err != nil {
		return fail("%v", err)
	}
	defer os.RemoveAll(state)

	setup, cancel := context.WithTimeout(ctx, setupLimit)
	defer cancel()
	sys, err = start(setup, state)
	if sys != nil {
		defer func() {
			down, cancel := context.WithTimeout(context.WithoutCancel(ctx), setupLimit)
			defer cancel()
			if err := sys.takeDown(down); err != nil {
				code = fail("taking the system down: %v", err)
			}
		}()
	}
	if err == nil {
		err = installSDKs(setup, sys.root)
	}
	if err != nil {
		return fail("setting up: %v", err)
	}
	return m.Run()
}

func fail(format string, args ...any) int {
	fmt.Fprintf(os.Stderr, "FAIL: "+format+"\n", args...)
	return 1
}
