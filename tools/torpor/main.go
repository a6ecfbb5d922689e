// Command torpor is the user's and the operator's tool: it brings the daemons up, shows sandboxes with both truths (the VM's
// state and envd's readiness), runs commands in them, puts them to sleep and wakes them, and says what ails a host.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

// version is set by the build (-ldflags -X main.version=…); empty in plain builds, which show the VCS revision instead.
var version string

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	a := &app{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, env: os.Getenv}
	code := a.run(ctx, os.Args[1:])
	stop()
	os.Exit(code)
}

// app is everything a command may touch of its surroundings.
type app struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	env            func(string) string
	apiURL, apiKey string // flags
}

// exitError ends the program with a code and without a word.
type exitError int

func (e exitError) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// run executes one command line and returns the exit code: the command's own for exec, 130 after Ctrl-C, 1 for any error.
func (a *app) run(ctx context.Context, args []string) int {
	root := a.rootCommand()
	root.SetArgs(args)
	root.SetIn(a.stdin)
	root.SetOut(a.stdout)
	root.SetErr(a.stderr)
	err := root.ExecuteContext(ctx)
	var exit exitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return int(exit)
	case errors.Is(err, context.Canceled) && ctx.Err() != nil:
		return 130
	}
	fmt.Fprintf(a.stderr, "torpor: %v\n", err)
	return 1
}
