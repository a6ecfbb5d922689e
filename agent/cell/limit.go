package cell

import (
	"fmt"
	"path/filepath"
	"slices"
	"strconv"

	"torpor/vmm/jail"
)

// memoryMax is memory.max for a guest of so many bytes.
//
// It must bound what a VMM run wild takes, and never be what kills an honest one. What cannot be reclaimed is the guest's memory,
// at most every page of it copied, and copied once more while a checkpoint is written and the guest writes all of it anew; what the kernel needs to map it (page tables here, in KVM and in a checkpoint's view, memory
// slots: below 1/64 of the guest); and the process itself. Page cache is charged to whoever touched a page first: to the first microVM of a
// template all that it reads of the shared memory image and the shared disk, and to each what it writes to its disk and its
// snapshot. All of that can be reclaimed (a mapped page of an image is dropped and read again; a written one is written back,
// and its writer waits for that), so the limit leads to reclaim and not to the OOM killer, as long as there is room left for
// some of it. That room is pageCache, and it is what disk and snapshot are fast in.
func memoryMax(guest uint64) uint64 {
	const (
		process   = 64 << 20
		pageCache = 256 << 20
	)
	return 2*guest + guest/64 + process + pageCache
}

// cpuPeriod is the kernel's default, in microseconds.
const cpuPeriod = 100_000

// cpuMax is cpu.max: all that the vCPUs can use, and one processor for the devices.
func cpuMax(vcpus int) string { return fmt.Sprintf("%d %d", (vcpus+1)*cpuPeriod, cpuPeriod) }

// Limit sets the cell's limits for a machine of so many bytes of memory and vCPUs. A cell begins with those of a VMM without
// a machine.
func (c *Cell) Limit(memoryBytes uint64, vcpus int) error {
	for _, l := range []struct{ controller, file, value string }{
		{"memory", "memory.max", strconv.FormatUint(memoryMax(memoryBytes), 10)},
		{"cpu", "cpu.max", cpuMax(vcpus)},
		{"pids", "pids.max", strconv.FormatUint(jail.DefaultLimits.Threads, 10)},
	} {
		if !slices.Contains(c.cells.cfg.Controllers, l.controller) {
			continue
		}
		if err := write(filepath.Join(c.dir(), l.file), l.value); err != nil {
			return fmt.Errorf("limit the microVM: %w", err)
		}
	}
	return nil
}
