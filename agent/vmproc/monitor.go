package vmproc

import (
	"fmt"
	"os"
	"strconv"
	"time"
)

// monitorSlack is by how much the sleeps of a VMM's monitor thread may be longer than it meant.
const monitorSlack = 2 * time.Millisecond

// calmMonitor lets the Go runtime's monitor of a process sleep longer. It is there for what takes milliseconds, a thread long in a
// system call or a goroutine long at it; but after each such event, and after each wake-up of the process, it looks more than 50
// times, 20 microseconds apart. The threads of a VMM are in long system calls all the time, waiting for the guest: the monitor then
// takes more of a processor than the devices do. The process cannot do this itself: it takes CAP_SYS_NICE for a thread of the
// runtime's. Where it fails nothing but the economy is lost.
func calmMonitor(pid int) {
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return
	}
	// The runtime makes it before any other (runtime.main), so its id is the next after the process's.
	monitor := 0
	for _, t := range threads {
		if id, err := strconv.Atoi(t.Name()); err == nil && id > pid && (monitor == 0 || id < monitor) {
			monitor = id
		}
	}
	if monitor != 0 {
		_ = os.WriteFile(fmt.Sprintf("/proc/%d/timerslack_ns", monitor), strconv.AppendInt(nil, monitorSlack.Nanoseconds(), 10), 0)
	}
}
