package sandbox

import (
	"context"
	"runtime"
	"sync"
	"time"

	"torpor/agent/kept"
	"torpor/api/apierr"
	"torpor/api/id"
)

// MaxForks is how many sandboxes one Fork may make.
const MaxForks = 100

// ForkRequest says what to make out of a sandbox.
type ForkRequest struct {
	ParentID string
	Children []Child
	Timeout  time.Duration // of each
}

// Child is one sandbox that a fork makes. What is not said here it has from its parent.
type Child struct{ ID, Token string }

// Forked is what became of one child.
type Forked struct {
	View View
	Err  error
}

func (r ForkRequest) validate() error {
	if len(r.Children) < 1 || len(r.Children) > MaxForks {
		return apierr.New(apierr.BadRequest, "a fork makes between 1 and %d sandboxes, not %d", MaxForks, len(r.Children))
	}
	seen := map[string]bool{r.ParentID: true}
	for _, c := range r.Children {
		if seen[c.ID] {
			return apierr.New(apierr.BadRequest, "sandbox_id %q is there twice", c.ID)
		}
		seen[c.ID] = true
	}
	return nil
}

// Fork makes sandboxes out of the present state of one, which is not disturbed: its state is kept once, for all of them, and each is
// created from that. It returns when every child is ready or has failed, in their order. An error of Fork itself says that
// none was begun.
func (m *Manager) Fork(ctx context.Context, req ForkRequest) ([]Forked, error) {
	if err := req.validate(); err != nil {
		return nil, err
	}
	parent, err := m.Get(req.ParentID)
	if err != nil {
		return nil, err
	}
	var orders []CreateRequest
	if !parent.do(func() { orders = parent.orders(req) }) {
		return nil, notFound(req.ParentID)
	}
	for _, o := range orders {
		if err := o.validate(); err != nil {
			return nil, err
		}
	}
	snapshotID := id.NewSnapshot()
	if _, err := parent.keep(ctx, snapshotID, kept.Passing); err != nil {
		return nil, err
	}
	defer func() {
		if err := m.cfg.Kept.Delete(snapshotID); err != nil {
			m.cfg.Log.Warn().Err(err).Str("snapshot", snapshotID).Msg("removing what a fork was made from")
		}
	}()
	for i := range orders {
		orders[i].SnapshotID = snapshotID
	}
	return m.createAll(ctx, orders), nil
}

// orders are the creations of a fork. Owner only.
func (s *Sandbox) orders(req ForkRequest) []CreateRequest {
	var orders []CreateRequest
	for _, c := range req.Children {
		r := s.rec.Clone()
		orders = append(orders, CreateRequest{
			ID: c.ID, Token: c.Token, TemplateID: r.TemplateID, Env: r.Env, Timeout: req.Timeout, OnTimeout: r.OnTimeout, AutoResume: r.AutoResume,
		})
	}
	return orders
}

// createAll creates sandboxes, some at a time: more than the processors would only make each of them slower.
func (m *Manager) createAll(ctx context.Context, orders []CreateRequest) []Forked {
	results := make([]Forked, len(orders))
	slots := make(chan struct{}, max(2, runtime.NumCPU()))
	var all sync.WaitGroup
	for i, o := range orders {
		slots <- struct{}{}
		all.Go(func() {
			defer func() { <-slots }()
			results[i].View, results[i].Err = m.Create(ctx, o)
		})
	}
	all.Wait()
	return results
}
