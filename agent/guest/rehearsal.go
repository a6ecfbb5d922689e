package guest

import (
	"context"

	"torpor/api/guestpb"
)

// Rehearsal is what happens first in a guest that was restored, step by step: it is made ready, and commands are run, the
// simplest first. The guest keeps nothing of it but what it was greeted with.
func (g *Guest) Rehearsal(greeting *guestpb.HandshakeRequest) []func(context.Context) error {
	run := func(script string) func(context.Context) error {
		return func(ctx context.Context) error { return g.run(ctx, script) }
	}
	return []func(context.Context) error{
		func(ctx context.Context) error {
			c, err := g.Handshake(ctx, greeting)
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = g.Probe(ctx, greeting.GetIncarnation())
			return err
		},
		run("echo first"),
		run("python3 -c pass"),
	}
}
