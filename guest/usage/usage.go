// Package usage reads how much CPU, memory and disk the guest uses.
package usage

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Sample is one measurement, in the JSON form of GET /metrics. Sizes are in bytes unless the name says MiB.
type Sample struct {
	Time       int64   `json:"ts"` // unix seconds
	CPUCount   int     `json:"cpu_count"`
	CPUPercent float64 `json:"cpu_used_pct"` // of all CPUs together, since the last sample (the first: since boot)
	MemTotal   uint64  `json:"mem_total"`
	MemUsed    uint64  `json:"mem_used"` // what could not be given to a new process
	MemCache   uint64  `json:"mem_cache"`
	MemTotalMB uint64  `json:"mem_total_mib"`
	MemUsedMB  uint64  `json:"mem_used_mib"`
	DiskUsed   uint64  `json:"disk_used"`
	DiskTotal  uint64  `json:"disk_total"`
}

// Meter takes samples.
type Meter struct {
	mu   sync.Mutex
	last ticks
}

// ticks are CPU times since boot, of all CPUs together, in the kernel's clock ticks.
type ticks struct{ busy, total uint64 }

// Sample measures now.
func (m *Meter) Sample(now time.Time) (Sample, error) {
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return Sample{}, fmt.Errorf("reading CPU times: %w", err)
	}
	cpu, err := parseStat(string(stat))
	if err != nil {
		return Sample{}, err
	}
	meminfo, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return Sample{}, fmt.Errorf("reading memory use: %w", err)
	}
	mem := parseMeminfo(string(meminfo))
	var disk unix.Statfs_t
	if err := unix.Statfs("/", &disk); err != nil {
		return Sample{}, fmt.Errorf("reading disk use: %w", err)
	}
	block := uint64(disk.Frsize)
	total, free := mem["MemTotal"], mem["MemAvailable"]
	return Sample{
		Time: now.Unix(), CPUCount: runtime.NumCPU(), CPUPercent: m.percent(cpu),
		MemTotal: total, MemUsed: total - min(free, total), MemCache: mem["Cached"],
		MemTotalMB: total >> 20, MemUsedMB: (total - min(free, total)) >> 20,
		DiskUsed: (disk.Blocks - disk.Bfree) * block, DiskTotal: disk.Blocks * block,
	}, nil
}

func (m *Meter) percent(now ticks) float64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	busy, total := now.busy-m.last.busy, now.total-m.last.total
	m.last = now
	if total == 0 || busy > total {
		return 0
	}
	return float64(int(10000*float64(busy)/float64(total))) / 100
}

// parseStat reads the first line of /proc/stat: user nice system idle iowait irq softirq steal (guest time is in user).
func parseStat(s string) (ticks, error) {
	line, _, _ := strings.Cut(s, "\n")
	fields := strings.Fields(line)
	if len(fields) < 9 || fields[0] != "cpu" {
		return ticks{}, errors.New("reading CPU times: /proc/stat has an unknown form")
	}
	var t ticks
	for i, f := range fields[1:9] {
		n, err := strconv.ParseUint(f, 10, 64)
		if err != nil {
			return ticks{}, fmt.Errorf("reading CPU times: %w", err)
		}
		t.total += n
		if i != 3 && i != 4 { // idle, iowait
			t.busy += n
		}
	}
	return t, nil
}

// parseMeminfo returns the lines of /proc/meminfo in bytes.
func parseMeminfo(s string) map[string]uint64 {
	values := map[string]uint64{}
	for lines := bufio.NewScanner(strings.NewReader(s)); lines.Scan(); {
		name, rest, ok := strings.Cut(lines.Text(), ":")
		if !ok {
			continue
		}
		fields := strings.Fields(rest)
		if len(fields) == 0 {
			continue
		}
		if n, err := strconv.ParseUint(fields[0], 10, 64); err == nil {
			values[name] = n << 10
		}
	}
	return values
}
