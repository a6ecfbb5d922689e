package main

import (
	"context"

	"torpor/api/vmmpb"
)

// WorkingSet implements vmmpb.VMMService.
func (s *server) WorkingSet(_ context.Context, r *vmmpb.WorkingSetRequest) (*vmmpb.WorkingSetResponse, error) {
	m, err := s.existing()
	if err != nil {
		return nil, err
	}
	c := claims{from: s.inbox}
	file := c.file(r.GetFile())
	if err := c.check(); err != nil {
		return nil, status(err)
	}
	all, written, err := m.WorkingSet(file)
	if err != nil {
		return nil, status(err)
	}
	return &vmmpb.WorkingSetResponse{Pages: all, PagesWritten: written}, nil
}
