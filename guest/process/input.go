package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"
)

// errInputClosed says that nothing more can be written to a process.
var errInputClosed = errors.New("stdin of the process is not enabled or already closed")

// input is the write side of a process: its stdin pipe, or the controlling side of its terminal. Writes are whole: two
// of them never mix.
type input struct {
	turn chan struct{} // capacity 1: whose turn it is to write
	file *os.File
}

func newInput(f *os.File) *input { return &input{turn: make(chan struct{}, 1), file: f} }

// write writes all of p, waiting for the process to read it, until ctx ends.
func (in *input) write(ctx context.Context, p []byte) error {
	if in == nil {
		return errInputClosed
	}
	select {
	case in.turn <- struct{}{}:
		defer func() { <-in.turn }()
	case <-ctx.Done():
		return ctx.Err()
	}
	if len(p) == 0 {
		return nil
	}
	interrupted := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(interrupted)
		_ = in.file.SetWriteDeadline(time.Unix(1, 0)) // a closed file needs no interruption
	})
	_, err := in.file.Write(p)
	if !stop() {
		<-interrupted
		_ = in.file.SetWriteDeadline(time.Time{})
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, os.ErrDeadlineExceeded):
		return ctx.Err()
	case errors.Is(err, os.ErrClosed):
		return errInputClosed
	}
	return fmt.Errorf("writing to the process: %w", err)
}

// close ends the input; a writer that waits is interrupted. Idempotent.
func (in *input) close() {
	if in != nil {
		_ = in.file.Close() // nothing is lost: pipes have no buffer of ours
	}
}
