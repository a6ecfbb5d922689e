// Package jail is what torpor-vmm locks itself into, so that a guest that breaks out of its virtual machine finds nothing.
//
// It happens in two stages. Enter runs first, as root and as the first process of a new pid namespace: it leaves the host's
// other namespaces, moves to a root directory that holds the program and an empty /proc, gives up every privilege for a user
// of its own, and starts the program again. Lock runs second, in that program, when all that needs a path or a socket has been
// opened: from then on a filter lets through the system calls that serving a guest takes, and no others. Everything that the
// process uses afterwards arrives as an open file.
//
// What each stage leaves out the other one does not need: without the filter the process could still do nothing to the host
// as a user without privileges in an empty root; without the jail the filter would still refuse to open or to run anything.
// The tests try what is forbidden to each of them alone.
//
// The package is a leaf. Who gives it cgroup and user is the agent's package cell.
package jail
