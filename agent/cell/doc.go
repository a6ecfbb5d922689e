// Package cell gives each VMM what no other may share: a cgroup (version 2) with limits on processor time, memory and threads,
// and a user. Package vmm/jail is what the VMM does with them.
//
// A cgroup is named for its user. The kernel makes a directory once and does not remove one that a process is in, so the
// directories are the record of which users are taken: it cannot be wrong after a crash of the agent, needs no file, and is
// shared by all agents under one parent. Making a cgroup and putting a process into it happens under a lock on the parent, so
// that an empty cgroup seen under the lock is nobody's and may go.
package cell
