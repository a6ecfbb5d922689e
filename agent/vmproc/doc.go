// Package vmproc starts, finds again, watches and ends torpor-vmm processes, one a microVM.
//
// A VMM outlives the agent: it is started in its own session with its stdio in a log file. A process is identified by its
// number and its start time (field 22 of /proc/PID/stat), which together are never reused within a boot, and is held by a
// pidfd, so that neither a signal nor a death notice can concern another process. Death is an event of the pidfd; nothing polls.
//
// A VMM opens no file and no socket: it inherits its sockets and /dev/kvm, and every file it works on is opened here and handed
// over (api/fdpass). The sockets' files stay where a later agent finds them. It runs in a jail (vmm/jail) and a cell (agent/cell)
// of its own; the cell gets the machine's limits when that is ordered, and goes when the process does.
//
// A Process is safe for concurrent use.
package vmproc
