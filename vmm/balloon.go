package main

import (
	"context"
	"errors"
	"time"

	"torpor/api/vmmpb"
	"torpor/vmm/virtio"
)

// How long a call of BalloonStats waits for the guest: unless told, and at most.
const (
	statsWait    = time.Second
	maxStatsWait = 10 * time.Second
)

var errSlowGuest = errors.New("it did not answer")

// SetBalloon implements vmmpb.VMMService.
func (s *server) SetBalloon(_ context.Context, r *vmmpb.SetBalloonRequest) (*vmmpb.SetBalloonResponse, error) {
	m, err := s.existing()
	if err != nil {
		return nil, err
	}
	if err := m.SetBalloon(r.GetTargetBytes()); err != nil {
		return nil, status(err)
	}
	s.log.Info().Uint64("bytes", r.GetTargetBytes()).Msg("balloon set")
	return &vmmpb.SetBalloonResponse{}, nil
}

// BalloonStats implements vmmpb.VMMService.
func (s *server) BalloonStats(ctx context.Context, r *vmmpb.BalloonStatsRequest) (*vmmpb.BalloonStatsResponse, error) {
	m, err := s.existing()
	if err != nil {
		return nil, err
	}
	wait := statsWait
	if ms := r.GetWaitMs(); ms > 0 {
		wait = min(time.Duration(ms)*time.Millisecond, maxStatsWait)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, wait, errSlowGuest)
	defer cancel()
	b, err := m.BalloonStats(ctx)
	if err != nil {
		return nil, status(err)
	}
	return &vmmpb.BalloonStatsResponse{Balloon: balloonState(&b)}, nil
}

// balloonState translates; no balloon stays none.
func balloonState(b *virtio.BalloonStatus) *vmmpb.BalloonState {
	if b == nil {
		return nil
	}
	s := &vmmpb.BalloonState{TargetBytes: b.Target, ActualBytes: b.Actual, DiscardedBytes: b.Discarded, Stats: b.Stats}
	if b.Stats != nil {
		s.StatsAgeMs = uint64(max(0, time.Since(b.Taken).Milliseconds())) // 0 if the clock went back
	}
	return s
}
