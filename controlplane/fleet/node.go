// Package fleet is the control plane's view of the agents: a client that reconnects, and the last state each sandbox was
// seen in. The agents are the truth; nothing here is stored.
//
// All calls to an agent are idempotent by contract (api/agentpb), so a call that lost its connection is sent again within
// the node's patience. Past it, the error is node_unreachable.
package fleet

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"github.com/containerd/ttrpc"
	"github.com/rs/zerolog"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"torpor/api/agentpb"
	"torpor/api/apierr"
)

// Config names a node and its times. Zero durations mean the defaults.
type Config struct {
	Socket string // the agent's unix socket
	// Patience bounds how long a call waits for an agent that is away (restarting, most often). Default 10 s.
	Patience time.Duration
	// ReadTimeout bounds calls that only read. Default 15 s.
	ReadTimeout time.Duration
}

// Node is one agent. It is safe for concurrent use.
type Node struct {
	cfg Config
	log zerolog.Logger

	mu     sync.Mutex
	client *ttrpc.Client       // nil when not connected
	seen   map[string]Observed // newest known state by sandbox id
}

// NewNode returns the client of one agent. It connects on first use.
func NewNode(cfg Config, log zerolog.Logger) *Node {
	if cfg.Patience <= 0 {
		cfg.Patience = 10 * time.Second
	}
	if cfg.ReadTimeout <= 0 {
		cfg.ReadTimeout = 15 * time.Second
	}
	return &Node{cfg: cfg, log: log, seen: map[string]Observed{}}
}

// Close ends the connection; calls under way fail.
func (n *Node) Close() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.client == nil {
		return nil
	}
	err := n.client.Close()
	n.client = nil
	return err
}

// invoke makes one call, connecting and repeating it within the node's patience. attempts is the number of times the
// request may have reached the agent.
func invoke[Req, Resp any](ctx context.Context, n *Node, call func(agentpb.AgentClient, context.Context, Req) (Resp, error), req Req) (resp Resp, attempts int, err error) {
	giveUp := time.Now().Add(n.cfg.Patience)
	for wait := 10 * time.Millisecond; ; wait = min(2*wait, 500*time.Millisecond) {
		var client *ttrpc.Client
		if client, err = n.connect(ctx); err == nil {
			attempts++
			if resp, err = call(agentpb.NewAgentClient(client), ctx, req); err == nil {
				return resp, attempts, nil
			}
		}
		switch {
		case ctx.Err() != nil:
			return resp, attempts, ctx.Err()
		case !connectionLost(err):
			return resp, attempts, apierr.FromStatus(err)
		}
		n.drop(client)
		if time.Now().Add(wait).After(giveUp) {
			n.log.Warn().Err(err).Str("agent", n.cfg.Socket).Msg("agent unreachable")
			return resp, attempts, unreachable(err)
		}
		select {
		case <-ctx.Done():
			return resp, attempts, ctx.Err()
		case <-time.After(wait):
		}
	}
}

// read is invoke for calls that change nothing and must be quick.
func read[Req, Resp any](ctx context.Context, n *Node, call func(agentpb.AgentClient, context.Context, Req) (Resp, error), req Req) (Resp, error) {
	limited, cancel := context.WithTimeout(ctx, n.cfg.ReadTimeout)
	defer cancel()
	resp, _, err := invoke(limited, n, call, req)
	if ctx.Err() == nil && (limited.Err() != nil || status.Code(err) == codes.DeadlineExceeded) {
		err = unreachable(context.DeadlineExceeded)
	}
	return resp, err
}

func unreachable(cause error) error {
	return apierr.New(apierr.NodeUnreachable, "the node's agent does not answer; try again (%w)", cause)
}

// connectionLost reports whether err says that the connection broke, as opposed to an answer of the agent.
func connectionLost(err error) bool {
	var op *net.OpError
	return errors.Is(err, ttrpc.ErrClosed) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.As(err, &op)
}

// connect returns the present connection or makes one.
func (n *Node) connect(ctx context.Context) (*ttrpc.Client, error) {
	n.mu.Lock()
	client := n.client
	n.mu.Unlock()
	if client != nil {
		return client, nil
	}
	client, err := n.dial(ctx)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.client != nil { // another caller was quicker
		_ = client.Close()
		return n.client, nil
	}
	n.client = client
	return client, nil
}

// dial opens a connection of its own.
func (n *Node) dial(ctx context.Context) (*ttrpc.Client, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", n.cfg.Socket)
	if err != nil {
		return nil, err
	}
	return ttrpc.NewClient(conn), nil
}

// drop forgets a broken connection.
func (n *Node) drop(client *ttrpc.Client) {
	if client == nil {
		return
	}
	_ = client.Close()
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.client == client {
		n.client = nil
	}
}
