package e2b

import "torpor/api/apierr"

// NewSnapshot is the optional body of POST /sandboxes/{id}/snapshots.
type NewSnapshot struct {
	Name *string `json:"name"` // "name" or "name:tag"
}

// Snapshot is the answer of that, and an element of GET /snapshots.
type Snapshot struct {
	SnapshotID string   `json:"snapshotID"` // may be given as templateID to create
	Names      []string `json:"names"`      // never null
}

// Fork is the optional body of POST /sandboxes/{id}/fork.
type Fork struct {
	Timeout *int64 `json:"timeout"` // seconds
	Count   *int64 `json:"count"`
}

// Forked is one element of its answer: exactly one of the two is set.
type Forked struct {
	Sandbox *Sandbox     `json:"sandbox,omitempty"`
	Error   *apierr.Body `json:"error,omitempty"`
}
