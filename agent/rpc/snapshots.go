package rpc

import (
	"context"

	"torpor/api/agentpb"
	"torpor/api/apierr"
)

// SnapshotCreate implements agentpb.AgentService.
func (s *Service) SnapshotCreate(context.Context, *agentpb.SnapshotCreateRequest) (*agentpb.Snapshot, error) {
	return nil, notServed()
}

// SnapshotList implements agentpb.AgentService.
func (s *Service) SnapshotList(context.Context, *agentpb.SnapshotListRequest) (*agentpb.SnapshotListResponse, error) {
	return &agentpb.SnapshotListResponse{}, nil
}

// SnapshotDelete implements agentpb.AgentService.
func (s *Service) SnapshotDelete(context.Context, *agentpb.SnapshotDeleteRequest) (*agentpb.SnapshotDeleteResponse, error) {
	return nil, notServed()
}

// Fork implements agentpb.AgentService.
func (s *Service) Fork(context.Context, *agentpb.ForkRequest) (*agentpb.ForkResponse, error) {
	return nil, notServed()
}

// Rollback implements agentpb.AgentService.
func (s *Service) Rollback(context.Context, *agentpb.RollbackRequest) (*agentpb.Sandbox, error) {
	return nil, notServed()
}

func notServed() error {
	return apierr.New(apierr.NotImplemented, "this version of the agent keeps no snapshots")
}
