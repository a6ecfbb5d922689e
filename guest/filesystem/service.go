// Package filesystem serves filesystem.Filesystem: what is in the guest's file system, and changes to its directories.
//
// Everything is done as root, whoever asks; the user of a request only decides what a relative path means and who owns
// what is made.
package filesystem

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"syscall"

	"connectrpc.com/connect"

	"torpor/api/envd"
	"torpor/api/envd/envdconnect"
	"torpor/guest/env"
)

// Service implements envdconnect.FilesystemHandler. Watching is not supported yet: those calls answer unimplemented.
type Service struct {
	envdconnect.UnimplementedFilesystemHandler
	store *env.Store
}

// New returns a Service that finds users and defaults in store.
func New(store *env.Store) *Service { return &Service{store: store} }

// resolve answers the user a request acts as, and its path made absolute.
func (s *Service) resolve(h http.Header, path string) (env.User, string, error) {
	u, err := s.store.User(env.RequestUser(h))
	if err != nil {
		if code, ok := env.UserErrorCode(err); ok {
			return u, "", connect.NewError(code, err)
		}
		return u, "", connect.NewError(connect.CodeInternal, err)
	}
	abs, err := s.store.Resolve(u, path)
	if err != nil {
		return u, "", connect.NewError(connect.CodeInvalidArgument, err)
	}
	return u, abs, nil
}

// named is resolve for calls that change what they name: an empty path is refused.
func (s *Service) named(h http.Header, field, path string) (env.User, string, error) {
	if path == "" {
		return env.User{}, "", connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("%s is empty", field))
	}
	return s.resolve(h, path)
}

// Stat describes one entry.
func (s *Service) Stat(_ context.Context, req *connect.Request[envd.StatRequest]) (*connect.Response[envd.StatResponse], error) {
	_, path, err := s.resolve(req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	e, err := newDescriber().entry(path, path)
	if err != nil {
		return nil, fileError(err)
	}
	return connect.NewResponse(&envd.StatResponse{Entry: e}), nil
}

// MakeDir makes a directory and its missing parents.
func (s *Service) MakeDir(_ context.Context, req *connect.Request[envd.MakeDirRequest]) (*connect.Response[envd.MakeDirResponse], error) {
	u, path, err := s.named(req.Header(), "path", req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	if info, err := os.Stat(path); err == nil {
		if info.IsDir() {
			return nil, connect.NewError(connect.CodeAlreadyExists, fmt.Errorf("directory already exists: %s", path))
		}
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("path already exists but is not a directory: %s", path))
	}
	if err := MakeDirs(path, int(u.UID), int(u.GID)); err != nil {
		return nil, fileError(err)
	}
	e, err := newDescriber().entry(path, path)
	if err != nil {
		return nil, fileError(err)
	}
	return connect.NewResponse(&envd.MakeDirResponse{Entry: e}), nil
}

// Move renames an entry, making the destination's missing parents.
func (s *Service) Move(_ context.Context, req *connect.Request[envd.MoveRequest]) (*connect.Response[envd.MoveResponse], error) {
	u, from, err := s.named(req.Header(), "source", req.Msg.GetSource())
	if err != nil {
		return nil, err
	}
	_, to, err := s.named(req.Header(), "destination", req.Msg.GetDestination())
	if err != nil {
		return nil, err
	}
	if _, err := os.Lstat(from); err != nil {
		return nil, fileError(err)
	}
	if err := MakeDirs(filepath.Dir(to), int(u.UID), int(u.GID)); err != nil {
		return nil, fileError(err)
	}
	if err := os.Rename(from, to); err != nil {
		return nil, fileError(err)
	}
	e, err := newDescriber().entry(to, to)
	if err != nil {
		return nil, fileError(err)
	}
	return connect.NewResponse(&envd.MoveResponse{Entry: e}), nil
}

// Remove removes an entry and all below it. It is no error if there is none.
func (s *Service) Remove(_ context.Context, req *connect.Request[envd.RemoveRequest]) (*connect.Response[envd.RemoveResponse], error) {
	_, path, err := s.named(req.Header(), "path", req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	if err := os.RemoveAll(path); err != nil && !errors.Is(err, syscall.ENOTDIR) {
		return nil, fileError(err)
	}
	return connect.NewResponse(&envd.RemoveResponse{}), nil
}

// ListDir lists a directory to a depth, parents before their children, in the order of names. Links to directories
// below it are listed, not entered.
func (s *Service) ListDir(ctx context.Context, req *connect.Request[envd.ListDirRequest]) (*connect.Response[envd.ListDirResponse], error) {
	_, path, err := s.resolve(req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	root, err := filepath.EvalSymlinks(path)
	if err != nil {
		return nil, linkError(err)
	}
	info, err := os.Stat(root)
	if err != nil {
		return nil, fileError(err)
	}
	if !info.IsDir() {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("path is not a directory: %s", path))
	}
	w := walk{ctx: ctx, root: root, shown: path, depth: max(1, int(req.Msg.GetDepth())), names: newDescriber()}
	if err := filepath.WalkDir(root, w.visit); err != nil {
		return nil, fileError(err)
	}
	return connect.NewResponse(&envd.ListDirResponse{Entries: w.entries}), nil
}

// walk collects the entries below root, under the name the client knows it by.
type walk struct {
	ctx         context.Context
	root, shown string
	depth       int
	names       *describer
	entries     []*envd.EntryInfo
}

func (w *walk) visit(path string, d fs.DirEntry, err error) error {
	if ctxErr := w.ctx.Err(); ctxErr != nil {
		return ctxErr
	}
	if err != nil {
		if path == w.root {
			return err
		}
		return nil // vanished, or cannot be entered: its siblings are still listed
	}
	if path == w.root {
		return nil
	}
	rel, err := filepath.Rel(w.root, path)
	if err != nil {
		return err
	}
	if e, err := w.names.entry(path, filepath.Join(w.shown, rel)); err == nil { // else: vanished
		w.entries = append(w.entries, e)
	}
	if d.IsDir() && depthOf(rel) >= w.depth {
		return fs.SkipDir
	}
	return nil
}

// depthOf counts the elements of a relative path.
func depthOf(rel string) int {
	n := 1
	for _, c := range rel {
		if c == filepath.Separator {
			n++
		}
	}
	return n
}

// linkError tells a chain of links without end from other errors; EvalSymlinks has no error value for it.
func linkError(err error) error {
	var pathErr *fs.PathError
	if !errors.As(err, &pathErr) {
		return connect.NewError(connect.CodeFailedPrecondition, err)
	}
	return fileError(err)
}

// fileError gives an error of the file system its Connect code.
func fileError(err error) error {
	code := connect.CodeInternal
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return connect.NewError(connect.CodeNotFound, fmt.Errorf("file not found: %w", err))
	case errors.Is(err, syscall.ELOOP):
		code = connect.CodeFailedPrecondition
	case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.EINVAL), errors.Is(err, syscall.ENAMETOOLONG):
		code = connect.CodeInvalidArgument
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		code = connect.CodeResourceExhausted
	case errors.Is(err, context.Canceled):
		code = connect.CodeCanceled
	case errors.Is(err, context.DeadlineExceeded):
		code = connect.CodeDeadlineExceeded
	}
	return connect.NewError(code, err)
}
