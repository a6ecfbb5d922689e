package process

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"

	"connectrpc.com/connect"

	"torpor/api/envd"
	"torpor/guest/env"
)

// The keepalive interval when a request names none, and the bounds of one it names.
const (
	keepaliveDefault = 90 * time.Second
	keepaliveMax     = time.Hour
)

var (
	errExpired = errors.New("the process was killed: its time was up")
	errCut     = errors.New("output was not read for too long while others waited for it")
)

// interval reads the Keepalive-Ping-Interval header, in whole seconds. A value that makes no sense is ignored.
func interval(h http.Header) time.Duration {
	n, err := strconv.Atoi(h.Get("Keepalive-Ping-Interval"))
	if d := time.Duration(n) * time.Second; err == nil && n > 0 && d/time.Second == time.Duration(n) && d <= keepaliveMax {
		return d
	}
	return keepaliveDefault
}

// relay sends start, then what arrives for sub up to and including end, and a keepalive whenever nothing was sent for an
// interval. It answers nil after end, else why it stopped early.
func relay(ctx context.Context, p *proc, sub *subscriber, every time.Duration, send func(*envd.ProcessEvent) error) error {
	start := &envd.ProcessEvent_StartEvent{Pid: uint32(p.pid)}
	if err := send(&envd.ProcessEvent{Event: &envd.ProcessEvent_Start{Start: start}}); err != nil {
		return err
	}
	quiet := time.NewTimer(every)
	defer quiet.Stop()
	for {
		ev := &envd.ProcessEvent{Event: &envd.ProcessEvent_Keepalive{Keepalive: &envd.ProcessEvent_KeepAlive{}}}
		select {
		case ev = <-sub.events:
		case <-quiet.C:
		case <-sub.cut:
			return errCut
		case <-ctx.Done():
			return ctx.Err()
		}
		if err := send(ev); err != nil || ev.GetEnd() != nil {
			return err
		}
		quiet.Reset(every)
	}
}

// streamError spells why a stream stopped before its end event.
func streamError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errExpired), errors.Is(err, context.DeadlineExceeded):
		return connect.NewError(connect.CodeDeadlineExceeded, err)
	case errors.Is(err, context.Canceled):
		return connect.NewError(connect.CodeCanceled, err)
	case errors.Is(err, errCut):
		return connect.NewError(connect.CodeResourceExhausted, err)
	}
	return err
}

// startError spells why no process was started.
func startError(err error) error {
	var bad *StartError
	var path *env.PathError
	switch {
	case errors.As(err, &bad), errors.As(err, &path):
		return connect.NewError(connect.CodeInvalidArgument, err)
	}
	if code, ok := env.UserErrorCode(err); ok {
		return connect.NewError(code, err)
	}
	return connect.NewError(connect.CodeInternal, err)
}

// inputError spells why input was not written.
func inputError(err error) error {
	var bad *StartError
	switch {
	case errors.As(err, &bad):
		return connect.NewError(connect.CodeInvalidArgument, err)
	case errors.Is(err, context.DeadlineExceeded):
		return connect.NewError(connect.CodeDeadlineExceeded, err)
	case errors.Is(err, context.Canceled):
		return connect.NewError(connect.CodeCanceled, err)
	}
	return connect.NewError(connect.CodeInternal, err)
}
