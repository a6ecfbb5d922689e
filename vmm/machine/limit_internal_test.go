package machine

import (
	"errors"
	"strings"
	"testing"

	"torpor/vmm/ratelimit"
)

func TestBadLimitIsRefused(t *testing.T) {
	cfg := testConfig(1, 128*mib)
	cfg.Disks = []Disk{{Limit: ratelimit.Limit{Ops: ratelimit.Bucket{Size: 1}}}}
	if err := cfg.validate(); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), "disk 0: bad rate limit: ops") {
		t.Errorf("%v", err)
	}
	cfg.Disks = nil
	cfg.Net = []Net{{ID: "n", LimitTX: ratelimit.Limit{Bytes: ratelimit.Bucket{Size: 1}}}}
	if err := cfg.validate(); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), "network card 0 (n): bad rate limit: bytes") {
		t.Errorf("%v", err)
	}
}
