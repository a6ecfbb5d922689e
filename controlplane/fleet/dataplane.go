package fleet

import (
	"context"
	"net"
	"net/http"
	"time"

	"torpor/api/hop"
)

// DataPlane reaches a node's gateway over its unix socket. The zero Patience means 10 s.
type DataPlane struct {
	Socket   string
	Patience time.Duration // how long a gateway that is away is dialled again; nothing has been sent by then
}

// Transport speaks HTTP/1.1 with the gateway, one connection a request: nothing is ever sent twice, and an aborted answer
// stays an aborted answer.
func (d DataPlane) Transport() *http.Transport {
	return &http.Transport{
		DialContext:           d.dial,
		DisableKeepAlives:     true,
		DisableCompression:    true,
		ExpectContinueTimeout: 5 * time.Second,
	}
}

// DialError marks a failure before anything was sent.
type DialError struct{ Err error }

func (e *DialError) Error() string { return "dial the gateway: " + e.Err.Error() }

// Unwrap returns the cause.
func (e *DialError) Unwrap() error { return e.Err }

func (d DataPlane) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	patience := d.Patience
	if patience <= 0 {
		patience = 10 * time.Second
	}
	limited, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for wait := 10 * time.Millisecond; ; wait = min(2*wait, 250*time.Millisecond) {
		conn, err := (&net.Dialer{}).DialContext(limited, "unix", d.Socket)
		if err == nil {
			return hop.AnswerFirst{Conn: conn}, nil
		}
		select {
		case <-limited.Done():
			return nil, &DialError{err}
		case <-time.After(wait):
		}
	}
}
