package main

import (
	"math"
	"testing"
	"time"

	"torpor/api/vmmpb"
	"torpor/vmm/ratelimit"
)

func TestLimit(t *testing.T) {
	if got := limit(nil); got != (ratelimit.Limit{}) {
		t.Errorf("no limit became %+v", got)
	}
	got := limit(&vmmpb.RateLimit{Bytes: &vmmpb.Bucket{Size: 5, Burst: 6, RefillNs: 7e9}})
	if want := (ratelimit.Limit{Bytes: ratelimit.Bucket{Size: 5, Burst: 6, Refill: 7 * time.Second}}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	if limit(&vmmpb.RateLimit{Ops: &vmmpb.Bucket{Size: 5, RefillNs: math.MaxUint64}}).Validate() == nil {
		t.Error("an endless refill time passes")
	}
	if (&claims{}).config(&vmmpb.Machine{Disks: []*vmmpb.Disk{{Limit: &vmmpb.RateLimit{Ops: &vmmpb.Bucket{Size: 5}}}}}).Disks[0].Limit.Ops.Size != 5 {
		t.Error("a disk lost its limit")
	}
	rate := func(n uint64) *vmmpb.RateLimit { return &vmmpb.RateLimit{Ops: &vmmpb.Bucket{Size: n}} }
	card := (&claims{}).config(&vmmpb.Machine{Nets: []*vmmpb.Net{{LimitRx: rate(5), LimitTx: rate(6)}}}).Net[0]
	if card.LimitRX.Ops.Size != 5 || card.LimitTX.Ops.Size != 6 {
		t.Errorf("a network card's limits became %+v", card)
	}
}
