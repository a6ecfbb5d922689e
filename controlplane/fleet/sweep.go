package fleet

import (
	"context"
	"time"

	"github.com/rs/zerolog"
)

// sweepEvery is how often a node is compared with what should exist.
const sweepEvery = 30 * time.Second

// Rows says what should not exist. controlplane/store implements it.
type Rows interface {
	Deleted(ctx context.Context, sandboxID string) (bool, error)
	SnapshotDeleted(ctx context.Context, snapshotID string) (bool, error)
}

// Sweeper ends sandboxes that run although they were deleted, and removes such snapshots: a create whose answer was lost, a delete
// that was cut between node and store. It never touches what has a row that is live or missing.
type Sweeper struct {
	node *Node
	rows Rows
	log  zerolog.Logger
}

// NewSweeper returns a sweeper of one node.
func NewSweeper(node *Node, rows Rows, log zerolog.Logger) *Sweeper {
	return &Sweeper{node: node, rows: rows, log: log}
}

// Run sweeps until ctx ends.
func (s *Sweeper) Run(ctx context.Context) {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		if err := s.Sweep(ctx); err != nil && ctx.Err() == nil {
			s.log.Warn().Err(err).Msg("sweep not finished")
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Sweep compares once.
func (s *Sweeper) Sweep(ctx context.Context) error {
	sandboxes, err := s.node.List(ctx)
	if err != nil {
		return err
	}
	for _, sb := range sandboxes {
		deleted, err := s.rows.Deleted(ctx, sb.SandboxId)
		if err != nil {
			return err
		}
		if !deleted {
			continue
		}
		s.log.Warn().Str("sandbox", sb.SandboxId).Msg("ending a sandbox that was deleted")
		if err := s.node.Kill(ctx, sb.SandboxId); err != nil {
			return err
		}
	}
	return s.sweepSnapshots(ctx)
}

func (s *Sweeper) sweepSnapshots(ctx context.Context) error {
	kept, err := s.node.Snapshots(ctx)
	if err != nil {
		return err
	}
	for id := range kept {
		deleted, err := s.rows.SnapshotDeleted(ctx, id)
		if err != nil {
			return err
		}
		if !deleted {
			continue
		}
		s.log.Warn().Str("snapshot", id).Msg("removing a snapshot that was deleted")
		if err := s.node.SnapshotDelete(ctx, id); err != nil {
			return err
		}
	}
	return nil
}
