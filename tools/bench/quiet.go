package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// A host is quiet when its processors were idle for nearly all of a window. What a measurement leaves behind (a killed machine's
// memory to be freed, a snapshot's pages to be written back) must not be charged to the next one.
const (
	quietWindow = 500 * time.Millisecond
	quietShare  = 0.9
	quietBudget = 2 * time.Minute
)

// processorTime is what all processors together have spent since the host started, in ticks.
type processorTime struct{ idle, total uint64 }

// quiet returns when the host is quiet, or fails when it does not become so.
func quiet(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, quietBudget)
	defer cancel()
	tick := time.NewTicker(quietWindow)
	defer tick.Stop()
	last, err := processors()
	for err == nil {
		select {
		case <-ctx.Done():
			return fmt.Errorf("the host did not become quiet, there is nothing to measure on it: %w", ctx.Err())
		case <-tick.C:
		}
		var now processorTime
		if now, err = processors(); err == nil && last.idleShare(now) >= quietShare {
			return nil
		}
		last = now
	}
	return err
}

// idleShare is the part of the time up to a later reading that was idle; 0 if no time passed.
func (p processorTime) idleShare(later processorTime) float64 {
	if later.total <= p.total || later.idle < p.idle {
		return 0
	}
	return float64(later.idle-p.idle) / float64(later.total-p.total)
}

func processors() (processorTime, error) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return processorTime{}, fmt.Errorf("reading how busy the host is: %w", err)
	}
	return parseProcessors(string(text))
}

// parseProcessors reads the first line of /proc/stat: user nice system idle iowait irq softirq steal guest guest_nice
// (proc_stat(5)). Waiting for a disk is not idle here; guest time is in user time already.
func parseProcessors(stat string) (p processorTime, err error) {
	line, _, _ := strings.Cut(stat, "\n")
	fields := strings.Fields(line)
	if len(fields) < 9 || fields[0] != "cpu" {
		return p, fmt.Errorf("reading how busy the host is: %.80q", line)
	}
	for i, f := range fields[1:9] {
		n, err := strconv.ParseUint(f, 10, 64)
		if err != nil {
			return p, fmt.Errorf("reading how busy the host is: %w", err)
		}
		p.total += n
		if i == 3 {
			p.idle = n
		}
	}
	return p, nil
}
