package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"syscall" //nolint:depguard // names of signals and error numbers, no call
	"time"

	stdlog "log"

	"github.com/rs/zerolog"

	"torpor/controlplane/auth"
	"torpor/controlplane/edge"
	"torpor/controlplane/fleet"
	"torpor/controlplane/rest"
	"torpor/controlplane/store"
)

// stopGrace is how long requests under way may go on after the stop signal. Streams longer than this are aborted.
const stopGrace = 5 * time.Second

// run serves until ctx ends. An error is one sentence that says what to do.
func run(ctx context.Context, cfg config, log zerolog.Logger) (err error) {
	if err := os.MkdirAll(cfg.Data, 0o700); err != nil {
		return fmt.Errorf("cannot make the data directory: %w; choose another with --data", err)
	}
	db, err := store.Open(ctx, filepath.Join(cfg.Data, "controlplane.db"))
	if err != nil {
		return explain(err, cfg)
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if err := db.AbandonSnapshots(ctx, time.Now()); err != nil {
		return explain(err, cfg)
	}
	keys, err := auth.Load(ctx, cfg.Data, db)
	if err != nil {
		return explain(err, cfg)
	}
	node := fleet.NewNode(fleet.Config{Socket: cfg.Agent, Patience: cfg.Patience}, log)
	defer node.Close()
	dataPlane := fleet.DataPlane{Socket: cfg.Gateway, Patience: cfg.Patience}
	api := rest.New(rest.Config{Domain: cfg.Domain, MaxTimeout: cfg.MaxTimeout, Version: version}, db, node, dataPlane, keys, log)

	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", cfg.Listen)
	if err != nil {
		return explain(err, cfg)
	}
	sweeper := fleet.NewSweeper(node, db, log)
	swept := make(chan struct{})
	sweepCtx, stopSweep := context.WithCancel(ctx)
	go func() { defer close(swept); sweeper.Run(sweepCtx) }()
	defer func() { stopSweep(); <-swept }()

	log.Info().Str("listen", listener.Addr().String()).Str("version", version).Msg("serving")
	return serve(ctx, listener, edge.New(cfg.Domain, api, db, node, dataPlane, log), log)
}

// serve answers requests until ctx ends, then lets those under way finish within the grace.
func serve(ctx context.Context, listener net.Listener, handler http.Handler, log zerolog.Logger) error {
	server := &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 30 * time.Second, // no other timeouts: streams and holds may last
		IdleTimeout:       11 * time.Minute,
		ErrorLog:          stdlog.New(io.Discard, "", 0), // client faults; ours are logged where they happen
	}
	var failed error
	stopped := make(chan struct{})
	go func() { defer close(stopped); failed = server.Serve(listener) }()
	select {
	case <-stopped:
		return fmt.Errorf("serve %s: %w", listener.Addr(), failed)
	case <-ctx.Done():
	}
	log.Info().Msg("stopping")
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopGrace)
	defer cancel()
	if err := server.Shutdown(grace); err != nil {
		err = server.Close()
		log.Info().Msg("long streams aborted")
		<-stopped
		return err
	}
	<-stopped
	return nil
}

// explain turns the usual causes into a sentence that says what to do.
func explain(err error, cfg config) error {
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("%s is in use by another process: stop that one, or choose another address with --listen", cfg.Listen)
	case isListen(err):
		return fmt.Errorf("cannot listen on %s: choose another address with --listen (%w)", cfg.Listen, err)
	case errors.Is(err, syscall.ENOSPC), store.IsFull(err):
		return fmt.Errorf("the disk of %s is full: free some space and start again", cfg.Data)
	}
	return err
}

func isListen(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "listen"
}
