// Package hop is what the two proxies of the data plane, the edge and the gateway, have in common: the headers between them,
// and the exact end of an exchange. An aborted answer is seen as aborted, an early answer wins over a broken upload, and no
// connection ends without a word.
package hop

import (
	"context"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"time"
)

// CutOnAbort is deferred around a proxy. It turns the proxy's http.ErrAbortHandler into a closed connection at once: left
// to net/http, the abort would wait for the client to go on sending a request body that is still open.
func CutOnAbort(w http.ResponseWriter) {
	v := recover()
	if v == nil {
		return
	}
	if v == http.ErrAbortHandler { //nolint:errorlint // net/http compares it like this
		if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
			_ = conn.Close() // it is cut either way
			return
		}
	}
	panic(v)
}

// AnswerFirst is a connection on which an answer wins over a broken upload. A server may answer early and close while the
// request body is still on its way; net/http would report the failed write and lose the answer. Here a failed write is
// dropped, and reading tells how the exchange ends: with the answer, or with the error.
type AnswerFirst struct{ net.Conn }

// Write implements net.Conn; it never fails.
func (c AnswerFirst) Write(p []byte) (int, error) {
	_, _ = c.Conn.Write(p)
	return len(p), nil
}

// Begin lets the answer to r start before the request has ended, and returns r with a body that is watched for Announce.
func Begin(w http.ResponseWriter, r *http.Request) *http.Request {
	_ = http.NewResponseController(w).EnableFullDuplex()
	if r.Body == nil || r.Body == http.NoBody {
		return r
	}
	body := &watched{ReadCloser: r.Body}
	r = r.WithContext(context.WithValue(r.Context(), watchedKey{}, body))
	r.Body = body
	return r
}

// Announce tells the client of r, in the header of the answer, that the connection ends with this answer, unless the request
// has been read to its end. It must be called before the header is sent. net/http cannot take another request from a
// full-duplex connection whose body it has to finish itself: it closes it, and a client that is not told would lose its next
// POST, which nobody may send twice.
func Announce(r *http.Request, header http.Header) {
	if body, ok := r.Context().Value(watchedKey{}).(*watched); ok && !body.ended.Load() {
		header.Set("Connection", "close")
	}
}

// How much of a request is still taken, and for how long, when its answer is out.
const (
	lingerBytes = 256 << 10
	lingerTime  = 2 * time.Second
)

// Finish is called when the answer to r is complete: it sends the answer off and takes what is still coming of the request, within
// bounds. A connection that is closed while its client still sends is reset, and the client may lose the answer (RFC 9112,
// section 9.6).
func Finish(w http.ResponseWriter, r *http.Request) {
	body, ok := r.Context().Value(watchedKey{}).(*watched)
	if !ok || body.ended.Load() {
		return
	}
	c := http.NewResponseController(w)
	if c.Flush() != nil || c.SetReadDeadline(time.Now().Add(lingerTime)) != nil {
		return // the connection is no longer the server's
	}
	_, _ = io.CopyN(io.Discard, body, lingerBytes) // however it ends, the connection ends with it
}

type watchedKey struct{}

// watched is a request body that remembers whether its end was reached.
type watched struct {
	io.ReadCloser
	ended atomic.Bool
}

// Read implements io.Reader.
func (b *watched) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF {
		b.ended.Store(true)
	}
	return n, err
}
