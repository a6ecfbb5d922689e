package main

import (
	"time"

	"torpor/api/vmmpb"
	"torpor/vmm/ratelimit"
)

// limit translates a rate limit of a request, which may be absent; package machine judges it.
func limit(r *vmmpb.RateLimit) ratelimit.Limit {
	return ratelimit.Limit{Ops: bucket(r.GetOps()), Bytes: bucket(r.GetBytes())}
}

func bucket(b *vmmpb.Bucket) ratelimit.Bucket {
	// A refill time too long for a Duration becomes a negative one, which is refused.
	return ratelimit.Bucket{Size: b.GetSize(), Burst: b.GetBurst(), Refill: time.Duration(b.GetRefillNs())}
}
