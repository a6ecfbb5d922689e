package rest

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"time"
)

// Snapshot is a kept state of a sandbox, as E2B's list tells it.
type Snapshot struct {
	SnapshotID string   `json:"snapshotID"`
	Names      []string `json:"names"`
}

// SnapshotDetail is a snapshot as /v1 tells it.
type SnapshotDetail struct {
	Snapshot
	SandboxID string    `json:"sandboxID"`
	CreatedAt time.Time `json:"createdAt"`
	SizeBytes int64     `json:"sizeBytes"` // may be shared
}

// Forked is what became of one fork: a sandbox that is ready, or an error.
type Forked struct {
	Sandbox *Sandbox
	Err     error // an *Error
}

// Fork makes count sandboxes out of the present state of one, which goes on. The error is of the call: nothing was begun.
func (c *Client) Fork(ctx context.Context, id string, count int, timeout time.Duration) ([]Forked, error) {
	var answer []struct {
		Sandbox *Sandbox        `json:"sandbox"`
		Error   json.RawMessage `json:"error"`
	}
	body := map[string]int{"count": count, "timeout": int(timeout.Seconds())}
	if _, err := c.Do(ctx, http.MethodPost, sandboxPath("/sandboxes/", id)+"/fork", body, &answer); err != nil {
		return nil, err
	}
	results := make([]Forked, len(answer))
	for i, a := range answer {
		if results[i].Sandbox = a.Sandbox; a.Sandbox == nil {
			results[i].Err = errorOf(a.Error)
		}
	}
	return results, nil
}

// errorOf reads an error body that came inside an answer.
func errorOf(raw json.RawMessage) *Error {
	e := &Error{Body: raw}
	var body struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
		Error   string `json:"error"`
	}
	if json.Unmarshal(raw, &body) == nil {
		e.Status, e.Code, e.Message = body.Code, body.Error, body.Message
	}
	return e
}

// CreateSnapshot keeps the present state of a sandbox. name may be empty.
func (c *Client) CreateSnapshot(ctx context.Context, id, name string) (Snapshot, error) {
	body := map[string]string{}
	if name != "" {
		body["name"] = name
	}
	var out Snapshot
	_, err := c.Do(ctx, http.MethodPost, sandboxPath("/sandboxes/", id)+"/snapshots", body, &out)
	return out, err
}

// Snapshots lists all snapshots, newest first.
func (c *Client) Snapshots(ctx context.Context) ([]Snapshot, error) {
	all := []Snapshot{}
	for token := ""; ; {
		resp, err := c.send(ctx, http.MethodGet, "/snapshots?nextToken="+url.QueryEscape(token), nil)
		if err != nil {
			return nil, err
		}
		var page []Snapshot
		err = json.NewDecoder(resp.Body).Decode(&page)
		resp.Body.Close()
		if err != nil {
			return nil, err
		}
		all = append(all, page...)
		if token = resp.Header.Get("X-Next-Token"); token == "" {
			return all, nil
		}
	}
}

// SnapshotsOf lists the snapshots of a sandbox, newest first.
func (c *Client) SnapshotsOf(ctx context.Context, id string) ([]SnapshotDetail, error) {
	all := []SnapshotDetail{}
	for after := ""; ; {
		var page struct {
			Snapshots []SnapshotDetail `json:"snapshots"`
			Next      string           `json:"next"`
		}
		path := sandboxPath("/v1/sandboxes/", id) + "/snapshots"
		if after != "" {
			path += "?after=" + url.QueryEscape(after)
		}
		if _, err := c.Do(ctx, http.MethodGet, path, nil, &page); err != nil {
			return nil, err
		}
		all = append(all, page.Snapshots...)
		if after = page.Next; after == "" {
			return all, nil
		}
	}
}

// DeleteSnapshot removes a snapshot, by its id or its name. What was made from it is not touched.
func (c *Client) DeleteSnapshot(ctx context.Context, ref string) error {
	_, err := c.Do(ctx, http.MethodDelete, "/templates/"+url.PathEscape(ref), nil, nil)
	return err
}

// Rollback takes a sandbox back to one of its snapshots, by its id or its name.
func (c *Client) Rollback(ctx context.Context, id, ref string) (State, error) {
	var out State
	_, err := c.Do(ctx, http.MethodPost, sandboxPath("/v1/sandboxes/", id)+"/rollback", map[string]string{"snapshotID": ref}, &out)
	return out, err
}
