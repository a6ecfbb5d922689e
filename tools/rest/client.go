// Package rest is the client side of Torpor's HTTP API for our own tools: the CLI, the end-to-end tests and the benchmark.
// It knows the wire and nothing of the servers' code, so that a change of the wire shows.
package rest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
)

// Client talks to one control plane. It is safe for concurrent use.
type Client struct {
	// API and Sandbox are base URLs (E2B_API_URL, E2B_SANDBOX_URL); an empty Sandbox means API.
	API, Sandbox string
	// Key is sent as X-API-KEY when it is not empty.
	Key string
	// HTTP is used for every request; nil means http.DefaultClient.
	HTTP *http.Client
}

// Error is an answer that is not 2xx.
type Error struct {
	Status  int
	Code    string // the stable word, when the body had one
	Message string
	Body    []byte // at most 64 KiB
}

func (e *Error) Error() string {
	if e.Message != "" {
		return e.Message
	}
	return fmt.Sprintf("the server answered %d %s", e.Status, http.StatusText(e.Status))
}

// StatusOf returns the HTTP status err carries, 0 when it is not an *Error.
func StatusOf(err error) int {
	var e *Error
	if errors.As(err, &e) {
		return e.Status
	}
	return 0
}

// UnreachableError says that no HTTP answer came at all.
type UnreachableError struct {
	URL string
	Err error
}

func (e *UnreachableError) Error() string {
	return fmt.Sprintf("nothing answers at %s (is Torpor up? see `torpor up` and `torpor doctor`): %v", e.URL, e.Err)
}

// Unwrap returns the transport's error.
func (e *UnreachableError) Unwrap() error { return e.Err }

const maxBody = 64 << 10

// Do sends body as JSON unless it is nil ([]byte goes as it is), decodes a 2xx answer into out unless it is nil, and returns
// the status. An answer of another status is an *Error.
func (c *Client) Do(ctx context.Context, method, path string, body, out any) (int, error) {
	resp, err := c.send(ctx, method, path, body)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if out == nil {
		_, err = io.Copy(io.Discard, resp.Body)
		return resp.StatusCode, err
	}
	if err := json.NewDecoder(resp.Body).Decode(out); err != nil {
		return resp.StatusCode, fmt.Errorf("the answer to %s %s is not the JSON expected: %w", method, path, err)
	}
	return resp.StatusCode, nil
}

// send returns a 2xx response, whose body the caller closes.
func (c *Client) send(ctx context.Context, method, path string, body any) (*http.Response, error) {
	var reader io.Reader
	switch b := body.(type) {
	case nil:
	case []byte:
		reader = bytes.NewReader(b)
	default:
		raw, err := json.Marshal(b)
		if err != nil {
			return nil, fmt.Errorf("encoding the request: %w", err)
		}
		reader = bytes.NewReader(raw)
	}
	req, err := http.NewRequestWithContext(ctx, method, strings.TrimRight(c.API, "/")+path, reader)
	if err != nil {
		return nil, fmt.Errorf("making the request: %w", err)
	}
	if reader != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if c.Key != "" {
		req.Header.Set("X-API-KEY", c.Key)
	}
	resp, err := c.client().Do(req)
	if err != nil {
		return nil, c.unreachable(ctx, err)
	}
	if resp.StatusCode/100 == 2 {
		return resp, nil
	}
	defer resp.Body.Close()
	return nil, readError(resp)
}

func (c *Client) unreachable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	var u *url.Error
	if errors.As(err, &u) {
		err = u.Err
	}
	return &UnreachableError{URL: c.API, Err: err}
}

func readError(resp *http.Response) *Error {
	e := &Error{Status: resp.StatusCode}
	e.Body, _ = io.ReadAll(io.LimitReader(resp.Body, maxBody)) // a broken body leaves the status, which is enough
	var body struct {
		Message string `json:"message"`
		Error   string `json:"error"`
	}
	if json.Unmarshal(e.Body, &body) == nil {
		e.Code, e.Message = body.Error, body.Message
	}
	return e
}

func (c *Client) client() *http.Client {
	if c.HTTP != nil {
		return c.HTTP
	}
	return http.DefaultClient
}

func (c *Client) sandboxBase() string {
	if c.Sandbox != "" {
		return strings.TrimRight(c.Sandbox, "/")
	}
	return strings.TrimRight(c.API, "/")
}
