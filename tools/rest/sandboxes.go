package rest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// Sandbox is the answer of create and connect.
type Sandbox struct {
	SandboxID   string `json:"sandboxID"`
	TemplateID  string `json:"templateID"`
	EnvdVersion string `json:"envdVersion"`
	AccessToken string `json:"envdAccessToken"`
}

// Detail is one sandbox as E2B's get and list tell it.
type Detail struct {
	Sandbox
	State      string            `json:"state"`
	StartedAt  time.Time         `json:"startedAt"`
	EndAt      time.Time         `json:"endAt"`
	CPUCount   int               `json:"cpuCount"`
	MemoryMB   int               `json:"memoryMB"`
	DiskSizeMB int               `json:"diskSizeMB"`
	Metadata   map[string]string `json:"metadata"`
}

// Lifecycle is what happens at the deadline and on a request while paused.
type Lifecycle struct {
	OnTimeout  string `json:"onTimeout"`
	AutoResume bool   `json:"autoResume"`
}

// VM is the machine's half of the truth.
type VM struct {
	State  string    `json:"state"`
	Since  time.Time `json:"since"`
	Reason string    `json:"reason"`
}

// Envd is the guest daemon's half of the truth.
type Envd struct {
	State       string    `json:"state"`
	Since       time.Time `json:"since"`
	Version     string    `json:"version"`
	Incarnation uint64    `json:"incarnation"`
	LatencyMs   float64   `json:"latencyMs"`
	Error       string    `json:"error"`
}

// State is Torpor's own answer about one sandbox: VM and envd apart.
type State struct {
	SandboxID   string    `json:"sandboxID"`
	Incarnation uint64    `json:"incarnation"`
	Public      string    `json:"public"`
	VM          VM        `json:"vm"`
	Envd        Envd      `json:"envd"`
	EndAt       time.Time `json:"endAt"`
	Lifecycle   Lifecycle `json:"lifecycle"`
	Memory      struct {
		GuestBytes    int64 `json:"guestBytes"`
		ResidentBytes int64 `json:"residentBytes"`
		SnapshotBytes int64 `json:"snapshotBytes"`
	} `json:"memory"`
	Disk struct {
		LayerBytes int64 `json:"layerBytes"`
	} `json:"disk"`
}

// Event is one kept transition.
type Event struct {
	Seq         uint64             `json:"seq"`
	At          time.Time          `json:"at"`
	Type        string             `json:"type"`
	From        string             `json:"from"`
	To          string             `json:"to"`
	Reason      string             `json:"reason"`
	Incarnation uint64             `json:"incarnation"`
	PhasesMs    map[string]float64 `json:"phasesMs"`
}

// Template is what sandboxes can be made from.
type Template struct {
	TemplateID string `json:"templateID"`
	Digest     string `json:"digest"`
	State      string `json:"state"` // building | ready | failed
	CPUCount   int    `json:"cpuCount"`
	MemoryMB   int    `json:"memoryMB"`
	DiskSizeMB int    `json:"diskSizeMB"`
}

// NewSandbox is the body of create (v2 spelling).
type NewSandbox struct {
	TemplateID string            `json:"templateID"`
	Timeout    int               `json:"timeout,omitempty"` // seconds
	Metadata   map[string]string `json:"metadata,omitempty"`
	EnvVars    map[string]string `json:"envVars,omitempty"`
	AutoPause  bool              `json:"autoPause,omitempty"`
	AutoResume *AutoResume       `json:"autoResume,omitempty"`
}

// AutoResume asks that requests wake a paused sandbox.
type AutoResume struct {
	Enabled bool `json:"enabled"`
}

// Health is the answer of GET /v1/health.
type Health struct {
	Status  string `json:"status"`
	Version string `json:"version"`
}

// Health needs no key.
func (c *Client) Health(ctx context.Context) (Health, error) {
	var out Health
	_, err := c.Do(ctx, http.MethodGet, "/v1/health", nil, &out)
	return out, err
}

// Create answers when the sandbox is ready.
func (c *Client) Create(ctx context.Context, req NewSandbox) (Sandbox, error) {
	var out Sandbox
	_, err := c.Do(ctx, http.MethodPost, "/v2/sandboxes", req, &out)
	return out, err
}

// Connect makes the sandbox ready and its deadline at least timeout away; resumed tells whether it had to be woken.
func (c *Client) Connect(ctx context.Context, id string, timeout time.Duration) (sb Sandbox, resumed bool, err error) {
	body := map[string]int{"timeout": int(timeout.Seconds())}
	status, err := c.Do(ctx, http.MethodPost, sandboxPath("/v2/sandboxes/", id)+"/connect", body, &sb)
	return sb, status == http.StatusCreated, err
}

// Pause answers when the snapshot is on disk. Pausing a paused sandbox is an *Error of status 409.
func (c *Client) Pause(ctx context.Context, id string) error {
	_, err := c.Do(ctx, http.MethodPost, sandboxPath("/sandboxes/", id)+"/pause", struct{}{}, nil)
	return err
}

// Kill ends a sandbox in any state.
func (c *Client) Kill(ctx context.Context, id string) error {
	_, err := c.Do(ctx, http.MethodDelete, sandboxPath("/sandboxes/", id), nil, nil)
	return err
}

// SetTimeout moves the deadline to now + timeout.
func (c *Client) SetTimeout(ctx context.Context, id string, timeout time.Duration) error {
	body := map[string]int{"timeout": int(timeout.Seconds())}
	_, err := c.Do(ctx, http.MethodPost, sandboxPath("/sandboxes/", id)+"/timeout", body, nil)
	return err
}

// Get is E2B's view of one sandbox.
func (c *Client) Get(ctx context.Context, id string) (Detail, error) {
	var out Detail
	_, err := c.Do(ctx, http.MethodGet, sandboxPath("/sandboxes/", id), nil, &out)
	return out, err
}

// List returns every page of E2B's list, newest first. states may name "running" and "paused"; empty means both.
func (c *Client) List(ctx context.Context, states string) ([]Detail, error) {
	all := []Detail{}
	query := url.Values{"limit": {"100"}}
	if states != "" {
		query.Set("state", states)
	}
	for {
		resp, err := c.send(ctx, http.MethodGet, "/v2/sandboxes?"+query.Encode(), nil)
		if err != nil {
			return nil, err
		}
		var page []Detail
		err = json.NewDecoder(resp.Body).Decode(&page)
		resp.Body.Close()
		if err != nil {
			return nil, fmt.Errorf("the list is not the JSON expected: %w", err)
		}
		all = append(all, page...)
		next := resp.Header.Get("X-Next-Token")
		if next == "" {
			return all, nil
		}
		query.Set("nextToken", next)
	}
}

// Template finds a template by its id on the first node that has it.
func (c *Client) Template(ctx context.Context, id string) (Template, error) {
	var out struct {
		Nodes []struct {
			Templates []Template `json:"templates"`
		} `json:"nodes"`
	}
	if _, err := c.Do(ctx, http.MethodGet, "/v1/nodes", nil, &out); err != nil {
		return Template{}, err
	}
	for _, n := range out.Nodes {
		for _, t := range n.Templates {
			if t.TemplateID == id {
				return t, nil
			}
		}
	}
	return Template{}, fmt.Errorf("no node has a template %q", id)
}

// State is Torpor's view of one sandbox.
func (c *Client) State(ctx context.Context, id string) (State, error) {
	var out State
	_, err := c.Do(ctx, http.MethodGet, sandboxPath("/v1/sandboxes/", id)+"/state", nil, &out)
	return out, err
}

// RawState is State undecoded, for printing.
func (c *Client) RawState(ctx context.Context, id string) (json.RawMessage, error) {
	var out json.RawMessage
	_, err := c.Do(ctx, http.MethodGet, sandboxPath("/v1/sandboxes/", id)+"/state", nil, &out)
	return out, err
}

// WatchState calls each with the present state and every later one until each returns false, the sandbox is gone (nil) or ctx ends.
func (c *Client) WatchState(ctx context.Context, id string, each func(json.RawMessage) bool) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the stream when each has had enough
	resp, err := c.send(ctx, http.MethodGet, sandboxPath("/v1/sandboxes/", id)+"/state?watch=true", nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	for lines := json.NewDecoder(resp.Body); ; {
		var line json.RawMessage
		if err := lines.Decode(&line); err == io.EOF {
			return nil
		} else if err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return fmt.Errorf("the watch broke off: %w", err)
		}
		if !each(line) {
			return nil
		}
	}
}

// WaitState watches until the state satisfies want, and returns it. A sandbox that goes away first is an error.
func (c *Client) WaitState(ctx context.Context, id string, want func(State) bool) (State, error) {
	var last State
	found := false
	err := c.WatchState(ctx, id, func(raw json.RawMessage) bool {
		var s State
		if json.Unmarshal(raw, &s) != nil {
			return true
		}
		last, found = s, want(s)
		return !found
	})
	switch {
	case err != nil:
		return last, fmt.Errorf("waiting on %s (vm %s, envd %s): %w", id, last.VM.State, last.Envd.State, err)
	case !found:
		return last, fmt.Errorf("%s went away while it was waited for (vm %s, envd %s)", id, last.VM.State, last.Envd.State)
	}
	return last, nil
}

// Events returns every kept event of a sandbox, oldest first, also after its end.
func (c *Client) Events(ctx context.Context, id string) ([]Event, error) {
	all, after := []Event{}, uint64(0)
	for {
		var page struct {
			Events []Event `json:"events"`
		}
		path := sandboxPath("/v1/sandboxes/", id) + "/events?after=" + strconv.FormatUint(after, 10)
		if _, err := c.Do(ctx, http.MethodGet, path, nil, &page); err != nil {
			return nil, err
		}
		if len(page.Events) == 0 {
			return all, nil
		}
		all = append(all, page.Events...)
		after = page.Events[len(page.Events)-1].Seq
	}
}

// Console copies the newest serial output to w.
func (c *Client) Console(ctx context.Context, id string, w io.Writer) error {
	resp, err := c.send(ctx, http.MethodGet, sandboxPath("/v1/sandboxes/", id)+"/console", nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, err = io.Copy(w, resp.Body)
	return err
}

func sandboxPath(prefix, id string) string { return prefix + url.PathEscape(id) }
